"""Fills in what a client left out: the model's defaults as vLLM applies them, the rest of the context, a seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdserve.base.errors import RequestError
from pdserve.base.sampling import SamplingParams
from router_svc.api.openai.schema import SamplingFields
from router_svc.api.served_model import ServedModel
from router_svc.generation import TextRules

Number = TypeVar("Number", int, float)

#: Sequences (prompts times n) one request may ask for.
MAX_SEQUENCES = 512
#: Sequences times tokens times reported log-probabilities: what a response that is not streamed must keep in memory.
MAX_LOGPROB_ENTRIES = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the endpoints name differently."""

    max_tokens: int | None
    #: Used when the client gave no `max_tokens`; None: the rest of the context.
    default_max_tokens: int | None
    #: Which field the client would have to change.
    max_tokens_param: str = "max_tokens"
    logprobs: int | None = None


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises `RequestError` naming the first id outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"Token id {str(wrong)[:20]} is not in the vocabulary of {vocab_size} tokens.", param=param)


def require_room(num_tokens: int, max_model_len: int, *, param: str) -> None:
    """Raises `RequestError` when a prompt leaves no room for a single token."""
    if num_tokens >= max_model_len:
        raise RequestError(
            f"The prompt has {num_tokens} tokens; this model's context holds {max_model_len}, "
            "and at least one must be left for the completion.",
            param=param,
        )


def text_rules(fields: SamplingFields) -> TextRules:
    """How the completion is turned into text."""
    return TextRules(
        stop=tuple(fields.stop or ()),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def sampling_params(
    fields: SamplingFields, asked: Asked, model: ServedModel, *, prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """The worker's view of a request. Raises `RequestError`."""
    defaults = model.defaults
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_token_ids(stop_token_ids, model.vocab_size, param="stop_token_ids")
    max_tokens = _max_tokens(asked, defaults.max_new_tokens, prompt_tokens, max_model_len)
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"`min_tokens` is {min_tokens}, but at most {max_tokens} tokens can be generated.", param="min_tokens"
        )
    return SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        top_k=max(_first(fields.top_k, defaults.top_k, 0), 0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        # The wire always carries a seed: any worker must be able to continue what another began.
        seed=fields.seed if fields.seed is not None else secrets.randbits(63),
        logprobs=asked.logprobs,
        n=fields.n or 1,
    )


def require_bounded(params: Sequence[SamplingParams]) -> None:
    """Bounds what multiplies, over all prompts of one request. Raises `RequestError`."""
    sequences = sum(each.n for each in params)
    if sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(params)} prompts with n = {params[0].n} make {sequences} sequences; "
            f"one request may have {MAX_SEQUENCES}.",
            param="n",
        )
    entries = sum(each.n * each.max_tokens * (each.logprobs + 1) for each in params if each.logprobs is not None)
    if entries > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"prompts * n * max_tokens * (logprobs + 1) is {entries}; one request may have {MAX_LOGPROB_ENTRIES}.",
            param="logprobs",
        )


def _max_tokens(asked: Asked, limit: int | None, prompt_tokens: int, max_model_len: int) -> int:
    room = max_model_len - prompt_tokens
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens and {asked.max_tokens} more are asked for; "
            f"this model's context holds {max_model_len}.",
            param=asked.max_tokens_param,
        )
    wanted = asked.max_tokens if asked.max_tokens is not None else asked.default_max_tokens
    return min(bound for bound in (room, wanted, limit) if bound is not None)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    # Digits only: int() would also take signs, spaces, underscores and other scripts' digits.
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 11)), None)
    if wrong is not None:
        raise RequestError(f"The keys of `logit_bias` must be token ids (got {wrong[:20]!r}).", param="logit_bias")
    converted = {int(key): value for key, value in biases.items()}
    check_token_ids(list(converted), vocab_size, param="logit_bias")
    return converted


def _first(*values: Number | None) -> Number:
    return next(value for value in values if value is not None)
