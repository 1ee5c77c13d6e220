"""Rows of attention alone, and of whole steps of the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.rows import Measured
from benchmarks.gpu.setting import DTYPE, Setting
from kernels.bench.inputs import blocks_of, kv_rows
from kernels.bench.work import Spans, Work, attention_work


def decode_attention(setting: Setting, context: int) -> Measured:
    """One new row in each sequence, one layer."""
    return _attention(setting, [(1, context)] * setting.sizes.batch, in_graph=True)


def prefill_attention(setting: Setting) -> Measured:
    """A whole prompt, one layer."""
    tokens = setting.sizes.prefill_tokens
    return _attention(setting, [(tokens, tokens)], in_graph=False)


def _attention(setting: Setting, spans: Spans, *, in_graph: bool) -> Measured:
    shape, rows = setting.shape, kv_rows(spans, setting.device, is_scattered=True)
    q = torch.randn(len(rows.positions), shape.num_heads, shape.head_dim, device=setting.device).to(DTYPE)
    paged = setting.paged_kv(rows, setting.kv_cache(blocks_of(spans), 1))
    # Reading the queries, and writing as many outputs.
    around = Work(num_bytes=2.0 * q.nbytes, flops=0.0)
    work = attention_work(shape, spans, DTYPE.itemsize) + around
    return setting.measure(partial(paged.attention, 0, q, None), work, in_graph=in_graph)


def decode_step(setting: Setting, batch: int) -> Measured:
    """Whole model, one token for each of `batch` sequences."""
    return setting.measure(*setting.step([(1, setting.sizes.step_context)] * batch), in_graph=True)


def prefill_step(setting: Setting) -> Measured:
    """Whole model, one prompt in one chunk."""
    tokens = setting.sizes.prefill_tokens
    return setting.measure(*setting.step([(tokens, tokens)]), in_graph=False)


def deterministic_step(setting: Setting) -> Measured:
    """The same decode step in both modes."""
    return _in_both_modes(setting, [(1, setting.sizes.step_context)] * setting.sizes.batch, in_graph=True)


def deterministic_prefill(setting: Setting) -> Measured:
    """The same prompt in both modes, in one chunk."""
    tokens = setting.sizes.prefill_tokens
    measured = _in_both_modes(setting, [(tokens, tokens)], in_graph=False)
    return replace(measured, how=f"{measured.how}, {'tall' if setting.has_tall_tiles else 'flat'} tiles")


def _in_both_modes(setting: Setting, spans: Spans, *, in_graph: bool) -> Measured:
    fast = setting.measure(*setting.step(spans), in_graph=in_graph)
    exact = setting.measure(*setting.step(spans, deterministic=True), in_graph=in_graph)
    return replace(exact, against_ms=fast.samples_ms)
