"""Fills in the fields that a client omitted: the model's defaults as in vLLM, the rest of the context, and a seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdserve.base.errors import ContextExceeded, RequestError, TooLarge
from pdserve.base.sampling import SamplingParams, ThinkingBudget
from router_svc.api.body import SamplingFields
from router_svc.api.sampling_defaults import SamplingDefaults
from router_svc.api.served_model import ServedModel, check_token_ids
from router_svc.generation import TextRules

Value = TypeVar("Value")

#: Sequences (prompts times n) of one request.
MAX_SEQUENCES = 512
#: Sequences times tokens times reported log-probabilities of one request. A response that is not streamed keeps them in
#: memory, about 400 bytes each, and an entry takes 7 us to write.
MAX_LOGPROB_ENTRIES = 65_536
#: Log-probabilities of prompt tokens in one request, over all choices that repeat them.
MAX_PROMPT_LOGPROB_ENTRIES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFields:
    """Fields that the endpoints name differently, and those that all prompts of a request share."""

    max_tokens: int | None
    #: Value when the client sets no `max_tokens`; None is the rest of the context.
    default_max_tokens: int | None
    #: Name of the client's field, for errors.
    max_tokens_param: str = "max_tokens"
    logprobs: int | None = None
    #: Alternatives of each prompt token; None: prompts have no log-probabilities.
    prompt_logprobs: int | None = None
    #: What the output has to match; empty: anything.
    grammar: str = ""
    #: Special tokens that the text has, whatever the client wants of others.
    kept_tokens: tuple[int, ...] = ()
    #: Whether the output goes on with the prompt's text.
    continues_text: bool = True
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: Bound on the output's thinking; None: it has no bound.
    thinking: ThinkingBudget | None = None
    priority: int = 0
    cache_salt: str = ""


def text_rules(fields: SamplingFields, own_fields: EndpointFields, defaults: SamplingDefaults) -> TextRules:
    """How the completion becomes text."""
    return TextRules(
        stop=tuple(_first(fields.stop, defaults.stop_strings, ())),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        kept_tokens=own_fields.kept_tokens,
        unfinished=b"" if own_fields.continues_text else None,
    )


def sampling_params(
    fields: SamplingFields, own_fields: EndpointFields, model: ServedModel, *, prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """The sampling parameters that workers receive. Raises `RequestError`."""
    defaults = model.defaults
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_token_ids(stop_token_ids, model.vocab_size, param="stop_token_ids")
    max_tokens = _max_tokens(own_fields, _limit(fields, own_fields, defaults), prompt_tokens, max_model_len)
    min_tokens = _first(fields.min_tokens, _own_minimum(own_fields, defaults, max_tokens))
    if min_tokens > max_tokens:
        raise RequestError(
            f"`min_tokens` is {min_tokens}, but at most {max_tokens} tokens can be generated. Lower it.",
            param="min_tokens",
        )
    return SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        top_k=_top_k(_first(fields.top_k, defaults.top_k, 0), model.vocab_size),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, model.vocab_size),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        # Workers always get a seed: any worker must be able to continue what another has started.
        seed=fields.seed if fields.seed is not None else secrets.randbits(63),
        logprobs=own_fields.logprobs,
        n=fields.n or 1,
        grammar=own_fields.grammar,
        allowed_token_ids=own_fields.allowed_token_ids,
        bad_words=own_fields.bad_words,
        logprob_token_ids=_logprob_token_ids(fields, own_fields, model),
        thinking=own_fields.thinking,
    )


def require_token(params: SamplingParams, model: ServedModel) -> None:
    """Raises `RequestError` where the fields that allow and forbid tokens leave none for the first one."""
    if not params.allowed_token_ids:
        return
    check_token_ids(params.allowed_token_ids, model.vocab_size, param="allowed_token_ids")
    left = set(params.allowed_token_ids).difference(word[0] for word in params.bad_words if len(word) == 1)
    if params.min_tokens and not params.grammar:
        left.difference_update(params.stop_token_ids, () if params.ignore_eos else model.tokenizer.eos_token_ids)
    if not left:
        raise RequestError(
            "`allowed_token_ids` has no token that `bad_words` and `min_tokens` leave. Allow others.",
            param="allowed_token_ids",
        )


def require_bounded(params: Sequence[SamplingParams]) -> None:
    """Checks limits that hold for all prompts of a request together. Raises `RequestError`."""
    sequences = sum(each.n for each in params)
    if sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(params)} prompts with n = {params[0].n} are {sequences} sequences, more than {MAX_SEQUENCES}. "
            "Split the request.",
            param="n",
        )
    entries = sum(each.n * each.max_tokens * each.num_logprobs for each in params)
    if entries > MAX_LOGPROB_ENTRIES:
        raise TooLarge(
            f"prompts * n * max_tokens * (logprobs + logprob_token_ids + 1) is {entries}, more than "
            f"{MAX_LOGPROB_ENTRIES}. Lower one of them.",
            param="logprobs",
        )


def require_few_scores(prompt_tokens: int, params: SamplingParams, alternatives: int | None) -> None:
    """Raises `TooLarge` for too many log-probabilities of prompts, which each choice repeats.

    `prompt_tokens`: of all prompts. `alternatives` None: there are no log-probabilities. Call it before anything is
    computed.
    """
    if alternatives is None:
        return
    entries = prompt_tokens * params.n * (1 + alternatives + len(params.logprob_token_ids))
    if entries > MAX_PROMPT_LOGPROB_ENTRIES:
        raise TooLarge(
            f"{prompt_tokens} prompt tokens * n * (alternatives + logprob_token_ids + 1) is {entries}, more than "
            f"{MAX_PROMPT_LOGPROB_ENTRIES} log-probabilities. Send fewer prompts, or request fewer alternatives.",
            param="prompt",
        )


def _limit(fields: SamplingFields, own_fields: EndpointFields, defaults: SamplingDefaults) -> int | None:
    """Upper limit of max_tokens.

    A client that omits max_tokens gets as much of the rest of the context as the bound on log-probabilities allows.
    """
    limits = [defaults.max_new_tokens]
    if own_fields.logprobs is not None and own_fields.max_tokens is None:
        reported = 1 + own_fields.logprobs + len(fields.logprob_token_ids or ())
        limits.append(max(1, MAX_LOGPROB_ENTRIES // ((fields.n or 1) * reported)))
    return min((limit for limit in limits if limit is not None), default=None)


def _max_tokens(own_fields: EndpointFields, limit: int | None, prompt_tokens: int, max_model_len: int) -> int:
    remaining, requested = max_model_len - prompt_tokens, own_fields.max_tokens
    if requested is not None and requested > remaining:
        raise ContextExceeded(
            f"The prompt has {prompt_tokens} tokens and `{own_fields.max_tokens_param}` is {requested}, "
            f"but the context holds {max_model_len} in total. Request at most {remaining} tokens.",
            param=own_fields.max_tokens_param,
        )
    wanted = requested if requested is not None else own_fields.default_max_tokens
    return min(bound for bound in (remaining, wanted, limit) if bound is not None)


def _own_minimum(own_fields: EndpointFields, defaults: SamplingDefaults, max_tokens: int) -> int:
    """The model's minimum, which gives way to what the client wants."""
    return 0 if own_fields.allowed_token_ids else min(defaults.min_new_tokens or 0, max_tokens)


def _top_k(value: int, vocab_size: int) -> int:
    """`top_k` as workers receive it: 0 for a value that limits nothing."""
    return value if 0 < value < vocab_size else 0


def _logprob_token_ids(fields: SamplingFields, own_fields: EndpointFields, model: ServedModel) -> tuple[int, ...]:
    if fields.logprob_token_ids and own_fields.logprobs is None:
        raise RequestError(
            "`logprob_token_ids` needs `logprobs`. Send it, too, as 0 or true.", param="logprob_token_ids"
        )
    token_ids = tuple(dict.fromkeys(fields.logprob_token_ids or ()))
    check_token_ids(token_ids, model.vocab_size, param="logprob_token_ids")
    return token_ids


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    # Digits only: int() would also accept signs, spaces, underscores and digits of other scripts.
    wrong = next((key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 11)), None)
    if wrong is not None:
        raise RequestError(f"The keys of `logit_bias` must be token ids (got {wrong[:20]!r}).", param="logit_bias")
    converted = {int(key): value for key, value in biases.items()}
    check_token_ids(list(converted), vocab_size, param="logit_bias")
    return converted


def _first(*values: Value | None) -> Value:
    return next(value for value in values if value is not None)
