"""Samples tokens from logits on the device, as `pdserve.engine.sampler` does, with one program per row.

A program uses only its row's logits and parameters, so a row's token is the same in every batch. It goes through the
vocabulary several times in blocks; after the first time, the row is in the cache. Scores that could win are computed in
double precision, as in the reference; float32 only finds out which ones could.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.logprobs import log_probabilities
from kernels.triton.penalties import edit_logits
from kernels.triton.philox import GUMBEL32_MARGIN, gumbel32, gumbel64, word_of_id, words_of_ids
from kernels.triton.sample_rows import MAX_ROWS, RowLogprobs, SampledTokens, SampleRows
from kernels.triton.truncation import ALL_TIES, inverse_temperature, scaled_logits, truncate

#: Tokens that a program processes together: many where it waits for memory, fewer where it computes.
_WIDE = 8192
_BLOCK = 2048
_NUM_WARPS = 16
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _largest(x_ptr, vocab, WIDE: tl.constexpr):
    """The largest logit, the lowest id that has it, and whether it is finite, with no NaN in the row."""
    top = tl.full([WIDE], float("-inf"), tl.float32)
    top_ids = tl.zeros([WIDE], tl.int32)
    is_nan = tl.zeros([WIDE], tl.int32)
    for start in range(0, vocab, WIDE):
        ids = start + tl.arange(0, WIDE)
        x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_nan |= (x != x).to(tl.int32)
        is_larger = x > top
        top = tl.where(is_larger, x, top)
        top_ids = tl.where(is_larger, ids, top_ids)
    best = tl.max(top, 0)
    best_id = tl.min(tl.where(top == best, top_ids, _NO_ID), 0)
    return best, best_id, (tl.max(is_nan, 0) == 0) & (tl.abs(best) < float("inf"))


@triton.jit
def _sample_token(
    x_ptr,
    vocab,
    best,
    best_id,
    temperature,
    threshold,
    num_ties,
    seed,
    choice,
    position,
    BLOCK: tl.constexpr,
):
    """The token with the largest (scaled logit + noise) that truncation left; of equal ones, the lowest id."""
    # The most likely token always survives truncation. Few blocks have a token that can beat its score.
    token = best_id
    score = gumbel64(word_of_id(seed, choice, position, best_id))
    top = best.to(tl.float32)
    inverse = inverse_temperature(temperature)
    num_equal = tl.zeros([], tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_left = (x >= threshold) & (x > float("-inf"))
        if num_ties < ALL_TIES:
            equals = (x == threshold).to(tl.int32)
            before = num_equal + tl.cumsum(equals, 0) - equals
            is_left = (x > threshold) | ((x == threshold) & (before < num_ties))
            num_equal += tl.sum(equals, 0)
        words = words_of_ids(seed, choice, position, start, BLOCK)
        estimate = tl.maximum(x - top, -1e30) * inverse + gumbel32(words)
        is_near = is_left & (estimate >= score.to(tl.float32) - GUMBEL32_MARGIN)
        if tl.max(is_near.to(tl.int32), 0) > 0:
            scores = scaled_logits(x, best, temperature) + gumbel64(words)
            scores = tl.where(is_near, scores, float("-inf"))
            block_score = tl.max(scores, 0)
            block_token = tl.min(tl.where(scores == block_score, ids, _NO_ID), 0)
            is_better = (block_score > score) | ((block_score == score) & (block_token < token))
            token = tl.where(is_better, block_token, token)
            score = tl.where(is_better, block_score, score)
    return token


@triton.jit
def _choose_kernel(
    logits_ptr,
    logits_stride,
    edited_ptr,
    is_edited_ptr,
    border_ptr,
    index_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    token_ptr,
    threshold_ptr,
    num_ties_ptr,
    vocab,
    HAS_EDITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    index = tl.load(index_ptr + row)
    # The results of a failed row, unless others are written below.
    tl.store(token_ptr + row, tl.full([], -1, tl.int64))
    tl.store(threshold_ptr + row, float("nan"))
    tl.store(num_ties_ptr + row, tl.full([], 0, tl.int64))
    if index < 0:
        return
    x_ptr = logits_ptr + index * logits_stride
    best32, best_id, is_finite = _largest(x_ptr, vocab, WIDE)
    if HAS_EDITS:  # noqa: SIM102 - the compiler leaves this one out
        if tl.load(is_edited_ptr + row) != 0:
            x_ptr = edited_ptr + row.to(tl.int64) * vocab
            edited_best, edited_id, is_edited_finite = _largest(x_ptr, vocab, WIDE)
            best32 = edited_best
            best_id = edited_id
            is_finite = is_finite & is_edited_finite
    if is_finite == 0:
        return
    temperature = tl.load(temperature_ptr + row)
    token = best_id
    if temperature > 0:
        best = best32.to(tl.float64)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        threshold = tl.full([], float("-inf"), tl.float32)
        num_ties = tl.full([], ALL_TIES, tl.int64)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            own_border_ptr = border_ptr + row.to(tl.int64) * vocab
            threshold, num_ties = truncate(
                x_ptr, own_border_ptr, vocab, best, temperature, top_k, top_p, min_p, WIDE, BLOCK
            )
        tl.store(threshold_ptr + row, threshold)
        tl.store(num_ties_ptr + row, num_ties)
        seed = tl.load(seed_ptr + row)
        choice = tl.load(choice_ptr + row).to(tl.int32)
        position = tl.load(position_ptr + row).to(tl.int32)
        token = _sample_token(
            x_ptr, vocab, best, best_id, temperature, threshold, num_ties, seed, choice, position, BLOCK
        )
    tl.store(token_ptr + row, token.to(tl.int64))


def sample(
    logits: Tensor, rows: SampleRows, *, has_edits: bool = True, max_logprobs: int | None = None
) -> SampledTokens:
    """One token for each row.

    logits: float32 [num_logits, vocab], rows contiguous, not modified. Without `has_edits` (no row has bias, penalties
    or bans) two fewer kernels run. With `max_logprobs` (0 to 20), rows that request log-probabilities get them, with at
    most that many alternatives. Takes 4 bytes of memory per row and token of the vocabulary, and 4 more for edits, for
    at most `MAX_ROWS` rows at a time. Launches depend on shapes and these arguments only; nothing is read back.
    """
    if rows.num_rows > MAX_ROWS:
        firsts = range(0, rows.num_rows, MAX_ROWS)
        chunks = [rows.chunk(first, min(first + MAX_ROWS, rows.num_rows)) for first in firsts]
        return _concatenated([sample(logits, each, has_edits=has_edits, max_logprobs=max_logprobs) for each in chunks])
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    sampled = _choose(logits, rows, has_edits=has_edits)
    if max_logprobs is None:
        return sampled
    return replace(sampled, logprobs=log_probabilities(logits, rows, sampled.token_ids, max_logprobs))


def _choose(logits: Tensor, rows: SampleRows, *, has_edits: bool) -> SampledTokens:
    num_rows, vocab = rows.num_rows, logits.shape[1]
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    threshold = torch.empty(num_rows, dtype=torch.float32, device=device)
    num_ties = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows > 0:
        padded = max(128, triton.next_power_of_2(vocab))
        edited, is_edited = edit_logits(logits, rows) if has_edits else (logits, rows.top_k)
        _choose_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            edited,
            is_edited,
            torch.empty(num_rows, vocab, dtype=torch.float32, device=device),
            rows.logits_index,
            rows.seed,
            rows.choice_index,
            rows.position,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            token_ids,
            threshold,
            num_ties,
            vocab,
            HAS_EDITS=has_edits,
            WIDE=min(_WIDE, padded),
            BLOCK=min(_BLOCK, padded),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return SampledTokens(token_ids=token_ids, threshold=threshold, num_ties=num_ties)


def _concatenated(chunks: list[SampledTokens]) -> SampledTokens:
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return SampledTokens(
        token_ids=torch.cat([chunk.token_ids for chunk in chunks]),
        threshold=torch.cat([chunk.threshold for chunk in chunks]),
        num_ties=torch.cat([chunk.num_ties for chunk in chunks]),
        logprobs=RowLogprobs(
            logprob=torch.cat([each.logprob for each in logprobs]),
            rank=torch.cat([each.rank for each in logprobs]),
            top_ids=torch.cat([each.top_ids for each in logprobs]),
            top_logprobs=torch.cat([each.top_logprobs for each in logprobs]),
            listed_logprobs=torch.cat([each.listed_logprobs for each in logprobs]),
        )
        if logprobs
        else None,
    )
