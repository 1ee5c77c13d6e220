"""Sampling parameters and sampled tokens as values, as workers see them: with all defaults and the seed filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdserve.base.errors import RequestError

#: Limits on what a request can make a worker allocate.
MAX_N = 128
#: Output that a request may bring to the worker that goes on with it, over all choices.
MAX_CONTINUED_TOKENS = 262_144
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
#: Devices hold it in 32 bits. Routers send 0 for every value that limits nothing.
MAX_TOP_K = 2**31 - 1
#: Ranges of numbers that scale or shift logits. Within them, finite logits stay finite in single precision.
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
#: Largest absolute value of presence and frequency penalties.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings by which tokens are sampled. `temperature` 0 is greedy; `top_k` 0 is no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    seed: int = 0
    #: Number of alternatives to report per token; None: report no log-probabilities.
    logprobs: int | None = None
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of an emitted token, its rank (1 is the most likely), and the top alternatives."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTokens:
    """Consecutive new tokens of one choice, numbered from `first_index` within its completion."""

    choice_index: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises `RequestError` for parameters with which some device could not sample, or not prepare to.

    Routers and workers call it, so that neither a client nor a peer can break a step.
    """
    biases = params.logit_bias
    for name, value, lowest, highest in (
        ("n", params.n, 1, MAX_N),
        ("temperature", params.temperature, 0, MAX_TEMPERATURE),
        ("top_p", params.top_p, 0, 1),
        ("top_k", params.top_k, 0, MAX_TOP_K),
        ("min_p", params.min_p, 0, 1),
        ("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("logprobs", params.logprobs or 0, 0, MAX_LOGPROBS),
        ("the number of entries of logit_bias", len(biases), 0, MAX_LOGIT_BIAS),
        ("the number of stop_token_ids", len(params.stop_token_ids), 0, MAX_STOP_TOKEN_IDS),
        *(("logit_bias", bias, -MAX_BIAS, MAX_BIAS) for bias in biases.values()),
    ):
        if not lowest <= value <= highest:  # NaN is in no range.
            raise RequestError(
                f"{name} is {value}, but must be between {lowest} and {highest}.", param=name.split()[-1]
            )
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}, but must be at least 1.", param="max_tokens")
    check_vocabulary("logit_bias", biases, vocab_size)
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)


def check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `RequestError`, which names the field, for an id outside of the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise RequestError(
            f"{name} has token id {worst}, but token ids must be between 0 and {vocab_size - 1}.", param=name
        )
