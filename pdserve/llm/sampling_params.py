"""`SamplingParams` with vLLM's names and defaults, checked by the rules of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from pdserve.base.errors import RequestError
from pdserve.base.sampling import MAX_LOGPROBS, MAX_THINKING
from router_svc.api.body import SamplingFields
from router_svc.api.parse import validate

#: What pdserve does not do: the only values accepted, and what to do instead.
_UNSUPPORTED: Mapping[str, tuple[object, str]] = {
    "detokenize": (True, "Outputs always have their text. Omit it, and read `token_ids`"),
    "spaces_between_special_tokens": (True, "Tokens are joined by their bytes. Omit it"),
    "repetition_detection": (None, "Use `repetition_penalty` or `frequency_penalty`"),
    "extra_args": (None, "There are no other arguments than those of this class"),
}
#: Fields that have their own names in requests, or none.
_OWN = {
    "logprobs",
    "max_tokens",
    "output_kind",
    "prompt_logprobs",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    *_UNSUPPORTED,
}


class RequestOutputKind(Enum):
    """What each `RequestOutput` of `AsyncLLM` has."""

    #: All of the output so far.
    CUMULATIVE = 0
    #: What is new since the one before.
    DELTA = 1
    #: There is one `RequestOutput`, at the end.
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What an output has to match: exactly one of the first six fields. Options of JSON are the others.

    `json` and `structural_tag` are a JSON schema and a structural tag, as an object or as JSON text.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"`structured_outputs` needs exactly one of {', '.join(kinds)} (got {given or 'none'}).")

    def as_fields(self) -> dict[str, Any]:
        """The value of the request's field."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}


@dataclass(kw_only=True)
class SamplingParams:
    """How outputs are sampled. Raises `ValueError`, naming the field, for a value that no server would accept.

    `max_tokens=None` is the rest of the context. Without `seed`, one follows from the seed of the `LLM`. `logprobs` is
    the number of likeliest alternatives, at most 20, and `logprob_token_ids` are reported with them.
    `prompt_logprobs` is the same for the prompt; `AsyncLLM` needs `RequestOutputKind.FINAL_ONLY` for it.
    `thinking_token_budget` is for `chat`, and a model that thinks.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.as_fields()

    def as_fields(self) -> dict[str, Any]:
        """The fields of a request that completions and chats share. Raises `ValueError`."""
        for name, (neutral, advice) in _UNSUPPORTED.items():
            if getattr(self, name) != neutral:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, which is not supported. {advice}.")
        budget = self.thinking_token_budget
        if budget is not None and not -1 <= budget <= MAX_THINKING:
            raise ValueError(f"`thinking_token_budget` is {budget}, but must be from -1 to {MAX_THINKING}, or None.")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"`{name}` is {value}, but must be from 0 to {MAX_LOGPROBS}, or None.")
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _OWN}
        fields["max_tokens"] = self.max_tokens
        if self.logit_bias is not None:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        fields = {name: value for name, value in fields.items() if value is not None}
        try:
            validate(SamplingFields, fields)
        except RequestError as error:
            raise ValueError(str(error)) from None
        if self.structured_outputs is not None:
            fields["structured_outputs"] = self.structured_outputs.as_fields()
        more = {"truncate_prompt_tokens": self.truncate_prompt_tokens, "prompt_logprobs": self.prompt_logprobs}
        return fields | {name: value for name, value in more.items() if value is not None}
