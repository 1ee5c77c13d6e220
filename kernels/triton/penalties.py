"""Edits logits before a token is chosen (bias, penalties, bans, grammar), in a copy of the rows that need it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sample_rows import SampleRows

_BLOCK = 1024


@triton.jit
def _copy_kernel(
    logits_ptr,
    logits_stride,
    index_ptr,
    bias_starts_ptr,
    banned_starts_ptr,
    slot_ptr,
    allowed_slot_ptr,
    allowed_ptr,
    num_words,
    edited_ptr,
    is_edited_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    """Copies a piece of a row's logits if the row needs edits, and records whether it does.

    Logits of tokens that are not allowed become minus infinity, which no other edit changes.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    index = tl.load(index_ptr + row)
    num_edits = tl.load(bias_starts_ptr + row + 1) - tl.load(bias_starts_ptr + row)
    num_edits += tl.load(banned_starts_ptr + row + 1) - tl.load(banned_starts_ptr + row)
    allowed_slot = tl.load(allowed_slot_ptr + row)
    is_edited = (index >= 0) & ((num_edits > 0) | (tl.load(slot_ptr + row) >= 0) | (allowed_slot >= 0))
    if piece == 0:
        tl.store(is_edited_ptr + row, is_edited.to(tl.int32))
    if is_edited:
        ids = piece * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + index * logits_stride + ids, mask=ids < vocab)
        if allowed_slot >= 0:
            words = tl.load(allowed_ptr + allowed_slot * num_words + ids // 32, mask=ids < vocab, other=0)
            x = tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))
        tl.store(edited_ptr + row.to(tl.int64) * vocab + ids, x, mask=ids < vocab)


@triton.jit(do_not_specialize=["capacity"])
def _edit_kernel(
    edited_ptr,
    is_edited_ptr,
    bias_starts_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    banned_starts_ptr,
    banned_ids_ptr,
    slot_ptr,
    history_ids_ptr,
    history_counts_ptr,
    history_lens_ptr,
    capacity,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    """Edits one row's copy. The ids of a list are distinct, so barriers are needed only between lists."""
    row = tl.program_id(0)
    if tl.load(is_edited_ptr + row) == 0:
        return
    x_ptr = edited_ptr + row.to(tl.int64) * vocab
    end = tl.load(bias_starts_ptr + row + 1)
    for start in range(tl.load(bias_starts_ptr + row), end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids_ptr + offsets, mask=offsets < end, other=0)
        x = tl.load(x_ptr + ids, mask=offsets < end, other=0.0)
        bias = tl.load(bias_values_ptr + offsets, mask=offsets < end, other=0.0)
        tl.store(x_ptr + ids, x + bias, mask=offsets < end)
    tl.debug_barrier()
    slot = tl.load(slot_ptr + row)
    if slot >= 0:
        repetition = tl.load(repetition_ptr + row)
        presence = tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        num_listed = tl.load(history_lens_ptr + slot)
        for first in range(0, num_listed, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            is_listed = offsets < num_listed
            ids = tl.load(history_ids_ptr + slot * capacity + offsets, mask=is_listed, other=0)
            counts = tl.load(history_counts_ptr + slot * capacity + offsets, mask=is_listed, other=0)
            x = tl.load(x_ptr + ids, mask=is_listed, other=0.0)
            # `/` is not rounded correctly in float32 on a GPU.
            divisor = tl.zeros([BLOCK], tl.float32) + repetition
            x = tl.where(x > 0, tl.div_rn(x, divisor), x * repetition)
            penalty = (frequency * counts.to(tl.float64) + presence).to(tl.float32)
            tl.store(x_ptr + ids, tl.where(counts > 0, x - penalty, x), mask=is_listed)
    tl.debug_barrier()
    end = tl.load(banned_starts_ptr + row + 1)
    for start in range(tl.load(banned_starts_ptr + row), end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(banned_ids_ptr + offsets, mask=offsets < end, other=0)
        tl.store(x_ptr + ids, tl.full([BLOCK], float("-inf"), tl.float32), mask=offsets < end)


@triton.jit(do_not_specialize=["capacity"])
def _history_kernel(
    token_ids_ptr, slot_ptr, history_ids_ptr, history_counts_ptr, history_lens_ptr, capacity, BLOCK: tl.constexpr
):
    """Counts one row's token in its slot, and lists it if it is new."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    token = tl.load(token_ids_ptr + row)
    if (slot < 0) | (token < 0):
        return
    ids_ptr = history_ids_ptr + slot * capacity
    counts_ptr = history_counts_ptr + slot * capacity
    num_listed = tl.load(history_lens_ptr + slot)
    found = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, num_listed, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + offsets, mask=offsets < num_listed, other=-1)
        found = tl.where(ids == token, offsets, found)
    index = tl.max(found, 0)
    if index >= 0:
        tl.store(counts_ptr + index, tl.load(counts_ptr + index) + 1)
    else:
        # If the slot is full, the token gets no penalties rather than overwriting another slot.
        if num_listed < capacity:
            tl.store(ids_ptr + num_listed, token.to(tl.int32))
            tl.store(counts_ptr + num_listed, 1)
            tl.store(history_lens_ptr + slot, num_listed + 1)


def edit_logits(logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
    """Edited logits, float32 [num_rows, vocab], and which rows have edits, int32 [num_rows].

    logits: float32 [num_logits, vocab], not modified. Rows without edits are not written.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    vocab = logits.shape[1]
    assert rows.allowed_words.is_contiguous()
    assert not len(rows.allowed_words) or rows.allowed_words.shape[1] == triton.cdiv(vocab, 32)
    edited = torch.empty(rows.num_rows, vocab, dtype=torch.float32, device=logits.device)
    is_edited = torch.empty(rows.num_rows, dtype=torch.int32, device=logits.device)
    if rows.num_rows == 0:
        return edited, is_edited
    piece = 4 * _BLOCK
    _copy_kernel[rows.num_rows, triton.cdiv(vocab, piece)](
        logits,
        logits.stride(0),
        rows.logits_index,
        rows.bias_starts,
        rows.banned_starts,
        rows.history_slot,
        rows.allowed_slot,
        rows.allowed_words,
        rows.allowed_words.shape[1],
        edited,
        is_edited,
        vocab,
        BLOCK=piece,
        enable_fp_fusion=False,
    )
    _apply_edits(edited, is_edited, rows)
    return edited, is_edited


def _apply_edits(edited: Tensor, is_edited: Tensor, rows: SampleRows) -> None:
    history = rows.history
    assert history.ids.is_contiguous()
    assert history.counts.is_contiguous()
    _edit_kernel[(rows.num_rows,)](
        edited,
        is_edited,
        rows.bias_starts,
        rows.bias_ids,
        rows.bias_values,
        rows.banned_starts,
        rows.banned_ids,
        rows.history_slot,
        history.ids,
        history.counts,
        history.lens,
        history.ids.shape[1],
        rows.repetition_penalty,
        rows.presence_penalty,
        rows.frequency_penalty,
        edited.shape[1],
        BLOCK=_BLOCK,
        # The reference rounds the product of frequency and count before it adds.
        enable_fp_fusion=False,
    )


def add_to_history(rows: SampleRows, token_ids: Tensor) -> None:
    """Counts each row's token in its slot of `rows.history`, in place; skips token -1 and rows without a slot.

    token_ids: int64 [num_rows]. No two rows may have the same slot.
    """
    if rows.num_rows == 0:
        return
    history = rows.history
    _history_kernel[(rows.num_rows,)](
        token_ids,
        rows.history_slot,
        history.ids,
        history.counts,
        history.lens,
        history.ids.shape[1],
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
