"""Inputs and results of sampling a batch of rows, as device tensors that the host never reads.

A row is one token to choose: its logits, its random numbers, and its `SamplingParams`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

#: Rows sampled at a time. Each takes memory for copies of its logits, and the choices of many prompts may start at
#: once.
MAX_ROWS = 256
_RAGGED = ("bias_starts", "banned_starts")
_SHARED = ("history", "bias_ids", "bias_values", "banned_ids", "allowed_words")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The tokens of each sequence so far, for penalties: one slot per sequence, which outlives the step.

    A slot lists every token of prompt and output once. `penalties.add_to_history` adds a sampled token on the device;
    the host fills a slot when its sequence starts (ids of the prompt with count 0).
    """

    #: int32 [num_slots, capacity]: distinct ids, in any order.
    ids: Tensor
    #: int32 [num_slots, capacity]: occurrences in the output; 0: in the prompt only.
    counts: Tensor
    #: int32 [num_slots]: number of listed ids.
    lens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """`num_rows` rows, each described by one element of each tensor, and by a slice of the two ragged lists.

    Parameters that the reference computes with in double precision are float64, so that they are the same numbers.
    For a CUDA graph, the tensors are buffers of fixed shapes; a row that is not used has `logits_index` -1.
    """

    #: int64: row of the logits, which several rows may share. -1: an unused row, whose token is -1.
    logits_index: Tensor
    #: int64: all 64 bits are used.
    seed: Tensor
    #: int64: index of the choice within its request, and of the token within its completion.
    choice_index: Tensor
    position: Tensor
    #: float64; 0: greedy.
    temperature: Tensor
    #: int32; 0: not limited.
    top_k: Tensor
    #: float64; 1: not limited.
    top_p: Tensor
    #: float64; 0: not limited.
    min_p: Tensor
    #: float32; 1: none.
    repetition_penalty: Tensor
    #: float64; 0: none.
    presence_penalty: Tensor
    frequency_penalty: Tensor
    #: int32: number of alternatives to report; 0: only the token's own log-probability; -1: none.
    num_logprobs: Tensor
    #: int64 [num_rows, max_listed]: tokens to report beside the alternatives; -1 behind the last one of a row.
    listed_ids: Tensor
    #: int64: slot in `history`; -1: the row has no penalties.
    history_slot: Tensor
    history: TokenHistory
    #: int64 [num_rows + 1]: row i has `bias_ids[bias_starts[i]:bias_starts[i + 1]]`, each id once (int64), and as many
    #: `bias_values` (float32).
    bias_starts: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    #: int64 [num_rows + 1], and the ids that may not be chosen now (int64).
    banned_starts: Tensor
    banned_ids: Tensor
    #: int64: row of `allowed_words`; -1: the row may have any token.
    allowed_slot: Tensor
    #: int32 [num_slots, ceil(vocab / 32)]: bit i % 32 of word i // 32 says whether id i may be chosen.
    allowed_words: Tensor

    @property
    def num_rows(self) -> int:
        """Rows, unused ones included."""
        return self.logits_index.shape[0]

    def chunk(self, first: int, end: int) -> SampleRows:
        """The rows [first, end)."""
        slices = {
            each.name: getattr(self, each.name)[first : end + (each.name in _RAGGED)]
            for each in fields(self)
            if each.name not in _SHARED
        }
        return SampleRows(**slices, **{name: getattr(self, name) for name in _SHARED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities of the raw logits; NaN, rank 0 and ids -1 where a row requested none, or failed."""

    #: float32 [num_rows], of the chosen token.
    logprob: Tensor
    #: int64 [num_rows], from 1 for the most likely token; tokens with equal logits rank by id.
    rank: Tensor
    #: int64 [num_rows, max_logprobs], the most likely first; -1 beyond the requested number and the vocabulary.
    top_ids: Tensor
    #: float32 [num_rows, max_logprobs].
    top_logprobs: Tensor
    #: float32 [num_rows, max_listed], of `listed_ids`.
    listed_logprobs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The chosen tokens."""

    #: int64 [num_rows]; -1: the logits have no finite maximum.
    token_ids: Tensor
    #: The result of truncation, for tests: all tokens whose edited logit is above `threshold` (float32 [num_rows]) are
    #: left, and the first `num_ties` (int64 [num_rows]) of those equal to it. NaN and 0 for failed and greedy rows.
    threshold: Tensor
    num_ties: Tensor
    logprobs: RowLogprobs | None = None
