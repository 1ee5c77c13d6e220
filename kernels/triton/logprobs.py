"""Log-probabilities, from the raw logits, of the chosen token and of the most likely ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sample_rows import RowLogprobs, SampleRows
from kernels.triton.truncation import order_key, value_of_key

#: Alternatives that a request may ask for, at most.
MAX_LOGPROBS = 20
_BLOCK = 4096
_NUM_WARPS = 16
_MAX_ID = tl.constexpr(2**31 - 1)
#: After every token.
_LAST = tl.constexpr(-(2**62))


@triton.jit
def _order(x, ids):
    """Sort keys (int64), larger for larger logits and, among equal logits, for lower ids."""
    return order_key(x) * (_MAX_ID + 1) + (_MAX_ID - ids)


@triton.jit
def _total_and_rank(x_ptr, vocab, token, chosen, BLOCK: tl.constexpr):
    """The logarithm of the sum of exponentials (float64), and the token's rank (int32, from 1)."""
    # One pass for both: each lane has a running maximum of its own, and a sum relative to it.
    largest = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf"))
        before += ((x > chosen) | ((x == chosen) & (ids < token))).to(tl.int32)
        larger = tl.maximum(largest, x)
        sums = sums * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    best = tl.max(largest, 0)
    total = tl.sum(sums.to(tl.float64) * tl.exp(largest.to(tl.float64) - best), 0)
    return best + tl.log(total), 1 + tl.sum(before, 0)


@triton.jit
def _top(x_ptr, vocab, count, log_total, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The `count` most likely tokens and their log-probabilities; -1 and NaN for the rest of OUTPUTS."""
    outputs = tl.arange(0, OUTPUTS)
    top_ids = tl.full([OUTPUTS], -1, tl.int64)
    top_logprobs = tl.full([OUTPUTS], float("nan"), tl.float32)
    # The largest key of each lane. The largest of all is output, and its lane is searched for the next one.
    lanes = tl.arange(0, BLOCK)
    firsts = tl.full([BLOCK], _LAST, tl.int64)
    if count > 0:
        for start in range(0, vocab, BLOCK):
            ids = start + lanes
            x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf"))
            firsts = tl.maximum(firsts, tl.where(ids < vocab, _order(x, ids), _LAST))
    for index in range(0, count):
        first = tl.max(firsts, 0)
        token_id = _MAX_ID - (first & _MAX_ID)
        lane = token_id % BLOCK
        ids = lane + tl.arange(0, ROUNDS) * BLOCK
        x = tl.load(x_ptr + ids, mask=ids < vocab, other=float("-inf"))
        order = _order(x, ids)
        following = tl.max(tl.where((ids < vocab) & (order < first), order, _LAST), 0)
        firsts = tl.where(lanes == lane, following, firsts)
        top_ids = tl.where(outputs == index, token_id, top_ids)
        logprob = (value_of_key(first >> 31) - log_total).to(tl.float32)
        top_logprobs = tl.where(outputs == index, logprob, top_logprobs)
    return top_ids, top_logprobs


@triton.jit(do_not_specialize=["max_logprobs"])
def _logprobs_kernel(
    logits_ptr,
    logits_stride,
    index_ptr,
    token_ptr,
    wanted_ptr,
    logprob_ptr,
    rank_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    log_total_ptr,
    vocab,
    max_logprobs,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row = tl.program_id(0)
    index = tl.load(index_ptr + row)
    token = tl.load(token_ptr + row)
    wanted = tl.load(wanted_ptr + row)
    logprob = tl.full([], float("nan"), tl.float32)
    rank = tl.full([], 0, tl.int64)
    top_ids = tl.full([OUTPUTS], -1, tl.int64)
    top_logprobs = tl.full([OUTPUTS], float("nan"), tl.float32)
    log_total = tl.full([], float("nan"), tl.float64)
    if (index >= 0) & (token >= 0) & (wanted >= 0):
        x_ptr = logits_ptr + index * logits_stride
        chosen = tl.load(x_ptr + token)
        log_total, token_rank = _total_and_rank(x_ptr, vocab, token, chosen, BLOCK)
        logprob = (chosen - log_total).to(tl.float32)
        rank = token_rank.to(tl.int64)
        count = tl.minimum(tl.minimum(wanted, max_logprobs), vocab)
        top_ids, top_logprobs = _top(x_ptr, vocab, count, log_total, BLOCK, ROUNDS, OUTPUTS)
    tl.store(logprob_ptr + row, logprob)
    tl.store(rank_ptr + row, rank)
    tl.store(log_total_ptr + row, log_total)
    outputs = tl.arange(0, OUTPUTS)
    tl.store(top_ids_ptr + row * max_logprobs + outputs, top_ids, mask=outputs < max_logprobs)
    tl.store(top_logprobs_ptr + row * max_logprobs + outputs, top_logprobs, mask=outputs < max_logprobs)


def log_probabilities(logits: Tensor, rows: SampleRows, token_ids: Tensor, max_logprobs: int) -> RowLogprobs:
    """Log-probabilities of the rows that request them (`rows.num_logprobs`), with at most `max_logprobs` alternatives.

    logits: float32 [num_logits, vocab], raw; token_ids: int64 [num_rows], the chosen ones; max_logprobs: 0 to 20.
    """
    assert 0 <= max_logprobs <= MAX_LOGPROBS
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_rows, vocab = rows.num_rows, logits.shape[1]
    device = logits.device
    log_total = torch.empty(num_rows, dtype=torch.float64, device=device)
    logprobs = RowLogprobs(
        logprob=torch.empty(num_rows, dtype=torch.float32, device=device),
        rank=torch.empty(num_rows, dtype=torch.int64, device=device),
        top_ids=torch.empty(num_rows, max_logprobs, dtype=torch.int64, device=device),
        top_logprobs=torch.empty(num_rows, max_logprobs, dtype=torch.float32, device=device),
        listed_logprobs=torch.empty(num_rows, rows.listed_ids.shape[1], dtype=torch.float32, device=device),
    )
    if num_rows > 0:
        block = min(_BLOCK, max(128, triton.next_power_of_2(vocab)))
        _logprobs_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            rows.logits_index,
            token_ids,
            rows.num_logprobs,
            logprobs.logprob,
            logprobs.rank,
            logprobs.top_ids,
            logprobs.top_logprobs,
            log_total,
            vocab,
            max_logprobs,
            BLOCK=block,
            ROUNDS=triton.next_power_of_2(triton.cdiv(vocab, block)),
            OUTPUTS=32,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
        if rows.listed_ids.shape[1]:
            # Padding and unused rows read the first logit; nobody reads what comes of it.
            listed = logits[rows.logits_index.clamp(min=0)[:, None], rows.listed_ids.clamp(min=0)]
            torch.sub(listed.double(), log_total[:, None], out=logprobs.listed_logprobs)
    return logprobs
