"""Steps over paged caches that are NaN wherever they must not be read, with the expected attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import KvRows
from kernels.triton.attention_launch import AttentionLaunch, AttentionLaunches
from kernels.triton.paged_step import PagedStep
from tests.support.devices import DEVICE

FP8 = torch.float8_e4m3fn
NAN = float("nan")

_SMALL = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}
#: Decode and prefill in the same tiles and splits, as in deterministic mode but small.
ALIGNED = AttentionLaunch(**_SMALL, split_tokens=32, even_splits=False)
SMALL_ALIGNED = AttentionLaunches(decode=ALIGNED, prefill=ALIGNED)
#: As in fast mode: contexts divided evenly, prefill without splits.
SMALL_FAST = AttentionLaunches(
    decode=AttentionLaunch(**_SMALL, split_tokens=48, even_splits=True),
    prefill=AttentionLaunch(**_SMALL, split_tokens=0, even_splits=False),
)


def make_rows(spans: list[tuple[int, int]], block_size: int, *, num_padding: int = 0, extra_width: int = 1) -> KvRows:
    """Sequences given as (rows, context). Tables are padded with block 0, which no sequence has.

    Padding rows come last: each is a sequence with an empty context, and has slot -1.
    """
    num_blocks = [-(-context // block_size) for _, context in spans]
    # In random order, since a sequence's blocks may be anywhere.
    ids = iter(torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(len(spans))).add(1).tolist())
    tables = [list(itertools.islice(ids, count)) for count in num_blocks]
    width = max(num_blocks, default=0) + extra_width
    positions = [list(range(context - rows, context)) for rows, context in spans]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for table, own in zip(tables, positions, strict=True)
        for p in own
    ]
    lengths = [rows for rows, _ in spans] + [1] * num_padding
    numbers = [
        [*itertools.chain(*positions)] + [0] * num_padding,
        slots + [-1] * num_padding,
        [0, *itertools.accumulate(lengths)],
        [context for _, context in spans] + [0] * num_padding,
    ]
    padded = [table + [0] * (width - len(table)) for table in tables] + [[0] * width] * num_padding
    return KvRows(
        **dict(
            zip(
                ("positions", "slot_mapping", "query_starts", "context_lens"),
                (torch.tensor(x, dtype=torch.int64, device=DEVICE) for x in numbers),
                strict=True,
            )
        ),
        block_tables=torch.tensor(padded, dtype=torch.int64, device=DEVICE).view(len(padded), width),
    )


def num_blocks_of(rows: KvRows) -> int:
    return int(rows.block_tables.max()) + 1 if rows.block_tables.numel() else 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step with rotated queries over a cache that has the keys visible to the rows, and NaN elsewhere."""

    step: PagedStep
    q: Tensor
    layer: int
    window: int | None
    #: Contents of the cache, float64: [2, num_kv_heads, context, head_dim] for each sequence.
    contexts: list[Tensor]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Attention in float64, and the same with the values' magnitudes, for error bounds."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        size = torch.zeros_like(out)
        group_size = self.q.shape[1] // self.step.num_kv_heads
        starts = self.step.rows.query_starts.tolist()
        for index, (keys, values) in enumerate(self.contexts):
            for row in range(starts[index], starts[index + 1]):
                position = keys.shape[1] - (starts[index + 1] - row)
                seen = slice(0 if self.window is None else max(0, position - self.window + 1), position + 1)
                k, v = (side[:, seen].repeat_interleave(group_size, 0) for side in (keys, values))
                weights = (torch.einsum("hd,hkd->hk", self.q[row].double(), k) * self.step.scale).softmax(-1)
                out[row] = torch.einsum("hk,hkd->hd", weights, v)
                size[row] = torch.einsum("hk,hkd->hd", weights, v.abs())
        return out.flatten(1), size.flatten(1)


def make_case(
    spans: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    num_padding: int = 0,
    seed: int = 0,
) -> Case:
    rows = make_rows(spans, block_size, num_padding=num_padding)
    generator = torch.Generator().manual_seed(seed)
    layers, layer = 2, 1
    cache = torch.full((num_blocks_of(rows), layers, 2, kv_heads, block_size, dim), NAN)
    scales = torch.rand((layers, 2, kv_heads), generator=generator) + 0.5
    contexts = []
    for table, (num_rows, context) in zip(rows.block_tables.cpu(), spans, strict=False):
        stored = torch.randn((2, kv_heads, context, dim), generator=generator).to(FP8 if fp8 else dtype)
        contexts.append((stored.double() * scales[layer, :, :, None, None] if fp8 else stored.double()).to(DEVICE))
        first_visible = 0 if window is None else max(0, context - num_rows - window + 1)
        for position in range(first_visible, context):
            block = int(table[position // block_size])
            cache[block, layer, :, :, position % block_size] = stored[:, :, position].float()
    num_tokens = sum(num_rows for num_rows, _ in spans) + num_padding
    # Strided, as a view of merged q, k and v is.
    q = torch.randn((num_tokens, heads + 2 * kv_heads, dim), generator=generator).to(DEVICE, dtype)[:, :heads]
    step = PagedStep(
        rows=rows,
        kv_cache=cache.to(DEVICE, FP8 if fp8 else dtype),
        cos_sin=torch.empty(0, 2, dim, device=DEVICE),
        scale=dim**-0.5,
        kv_scales=scales.to(DEVICE) if fp8 else None,
    )
    return Case(step=step, q=q, layer=layer, window=window, contexts=contexts)
