"""Results, with the fields of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, of the raw softmax.

    `rank` is 1 for the likeliest token. It is None, since it is not known, for tokens of `logprob_token_ids`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's `n` outputs.

    `logprobs` has one dict per token, with the sampled one first. `finish_reason` is `stop`, `length`, `tool_calls` or
    `abort`; `stop_reason` is the stop string or token. In a chat, `text` is the message without calls and thinking,
    which are in `tool_calls`, as the HTTP API writes them, and `reasoning`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers there are."""
        return len(self.embedding)


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The embedding of a prompt, and the tokens that it was made of. `request_id` is for `pdserve trace`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True, kw_only=True)
class ScoringOutput:
    """How close two texts are, from -1 to 1."""

    score: float


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput:
    """The score of a pair. `prompt_token_ids` are those of both texts, `request_id` that of the second one."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The outputs of a prompt. `prompt` is None where it was sent as token ids or as messages.

    `request_id` is the request's `X-Request-Id`, for `pdserve trace`. `prompt_logprobs` has None for the first token
    and a dict for each further one. `seed` gives the same output over HTTP; None: the server has chosen one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    seed: int | None = None
