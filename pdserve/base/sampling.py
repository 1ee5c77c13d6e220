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
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 16_384
#: Sequences of tokens, and the tokens of all of them.
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 16_384
#: Characters.
MAX_GRAMMAR = 262_144
#: Maximum number of tokens that a grammar forces behind one that is sampled. A client has them before their KV is
#: computed. Routers of the last release count on it.
MAX_FORCED = 16
#: Devices hold it in 32 bits. Routers send 0 for every value that limits nothing.
MAX_TOP_K = 2**31 - 1
#: Characters of a delimiter of thinking; how many may close it; tokens of one of them.
MAX_DELIMITER, MAX_CLOSINGS, MAX_CLOSING_TOKENS = 128, 8, 64
#: Tokens. More than any context holds.
MAX_THINKING = 2**31 - 1
#: Ranges of numbers that scale or shift logits. Within them, finite logits stay finite in single precision.
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
#: Largest absolute value of presence and frequency penalties.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


#: What a worker knows of `SamplingParams`, in its record: an older one would ignore fields that came later.
#: 1: `allowed_token_ids`, `bad_words` and `logprob_token_ids`. 2: prefill workers score prompts. 3: `thinking`, and
#: prefill workers pool prompts.
SAMPLING_VERSION = 3
SCORING_VERSION = 2
POOLING_VERSION = 3
_THINKING_VERSION = 3


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How many tokens of an output are thinking at most, and what it is between."""

    #: The number of tokens of thinking after which only `closing_token_ids` may follow.
    max_tokens: int
    #: The prompt ends within thinking.
    is_open: bool
    #: The text that opens thinking, and those of which each closes it.
    opening: str
    closings: tuple[str, ...]
    closing_token_ids: tuple[int, ...]


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
    #: What the output has to match, in the form of `pdserve.model.grammar`; empty: anything.
    grammar: str = ""
    #: The only tokens of the output; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    #: Sequences of tokens that the output does not contain.
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: Tokens to report beside the likeliest ones, with `logprobs`; each once.
    logprob_token_ids: tuple[int, ...] = ()
    #: How long the output thinks at most; None: as long as it does.
    thinking: ThinkingBudget | None = None

    @property
    def version(self) -> int:
        """The `SAMPLING_VERSION` that a worker needs at least."""
        if self.thinking is not None:
            return _THINKING_VERSION
        return int(bool(self.allowed_token_ids or self.bad_words or self.logprob_token_ids))

    @property
    def follows_text(self) -> bool:
        """Whether which token may come next depends on the output's text, so that a worker needs the tokenizer."""
        return bool(self.grammar) or self.thinking is not None

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that are reported of each token, its own included."""
        return 0 if self.logprobs is None else 1 + self.logprobs + len(self.logprob_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of an emitted token, its rank (1 is the most likely), and the top alternatives.

    Behind the latter come those of `logprob_token_ids` that are not among them, in the order of the request.
    """

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
        ("the number of characters of grammar", len(params.grammar), 0, MAX_GRAMMAR),
        ("the number of logprob_token_ids", len(params.logprob_token_ids), 0, MAX_LOGPROB_TOKEN_IDS),
        ("the number of allowed_token_ids", len(params.allowed_token_ids), 0, MAX_ALLOWED_TOKEN_IDS),
        ("the number of bad_words", len(params.bad_words), 0, MAX_BAD_WORDS),
        ("the number of tokens of bad_words", sum(map(len, params.bad_words)), 0, MAX_BAD_WORD_TOKENS),
        ("the length of each of the bad_words", min(map(len, params.bad_words), default=1), 1, MAX_BAD_WORD_TOKENS),
        *(("logit_bias", bias, -MAX_BIAS, MAX_BIAS) for bias in biases.values()),
        *_thinking_ranges(params.thinking),
    ):
        if not lowest <= value <= highest:  # NaN is in no range.
            raise RequestError(
                f"{name} is {value}, but must be between {lowest} and {highest}.", param=name.split()[-1]
            )
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}, but must be at least 1.", param="max_tokens")
    check_vocabulary("logit_bias", biases, vocab_size)
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    check_vocabulary("logprob_token_ids", params.logprob_token_ids, vocab_size)
    check_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
    check_vocabulary("bad_words", [token for word in params.bad_words for token in word], vocab_size)
    if params.thinking is not None:
        check_vocabulary("thinking.closing_token_ids", params.thinking.closing_token_ids, vocab_size)


def _thinking_ranges(budget: ThinkingBudget | None) -> tuple[tuple[str, int, int, int], ...]:
    """Names, values and bounds of a budget's numbers."""
    if budget is None:
        return ()
    texts = (budget.opening, *budget.closings)
    return (
        ("thinking_token_budget", budget.max_tokens, 0, MAX_THINKING),
        ("the number of closings of thinking", len(budget.closings), 1, MAX_CLOSINGS),
        ("the number of closing_token_ids of thinking", len(budget.closing_token_ids), 1, MAX_CLOSING_TOKENS),
        ("the length of each delimiter of thinking", min(map(len, texts)), 1, MAX_DELIMITER),
        ("the length of each delimiter of thinking", max(map(len, texts)), 1, MAX_DELIMITER),
    )


def check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `RequestError`, which names the field, for an id outside of the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise RequestError(
            f"{name} has token id {worst}, but token ids must be between 0 and {vocab_size - 1}.", param=name
        )
