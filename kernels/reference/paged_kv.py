"""Paged KV in plain torch: one scatter writes the rotated rows, one gather per group reads contexts back.

The cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] is contiguous, so it can be seen as a table of
tiles [block_size * head_dim], one per (block, layer, K|V, head), or of vectors [head_dim], one per (..., offset). Both
tables are indexed on their first dimension only, and the same tile of the next layer is a fixed number further on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import KvRows
from kernels.reference.fp8 import FP8, from_fp8, to_fp8

#: Rows of a long chunk are attended in tiles: a tile needs no KV beyond its last row, and its mask stays small.
_QUERY_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionGroup:
    """`num_sequences` sequences with `num_rows` rows each, attended in one call; one of the two numbers is 1."""

    num_sequences: int
    num_rows: int
    #: The group's rows in the batch; a slice when they are adjacent.
    rows: Tensor | slice
    #: [2 * num_sequences * num_kv_heads * num_blocks] tiles of layer 0: K of all sequences, then V.
    tiles: Tensor
    #: The used ones of the gathered positions.
    keys: slice
    #: Additive, [num_sequences, num_rows, num_keys] in q's dtype; None when every row sees every key.
    mask: Tensor | None


class ReferencePagedKv:
    """Implements `kernels.ops.PagedKv`. Lives for one step; holds views of the cache."""

    def __init__(
        self, rows: KvRows, kv_cache: Tensor, cos_sin: Tensor, scale: float, *, kv_scales: Tensor | None = None
    ) -> None:
        _, self._num_layers, two, self._num_kv_heads, self._block_size, self._head_dim = kv_cache.shape
        assert two == 2
        assert kv_cache.is_contiguous()
        assert (kv_cache.dtype == FP8) == (kv_scales is not None)
        if kv_scales is not None:
            assert kv_scales.shape == kv_cache.shape[1:4]
            assert kv_scales.dtype == torch.float32
            kv_cache = kv_cache.view(torch.uint8)
        self._kv_scales = kv_scales
        self._scale = scale
        self._rows = rows
        self._tiles = kv_cache.view(-1, self._block_size * self._head_dim)
        self._vectors = kv_cache.view(-1, self._head_dim)
        self._groups: dict[int | None, list[_AttentionGroup]] = {}
        # For all layers: angles, the vectors that each row writes, and the blocks it opens.
        angles = cos_sin.index_select(0, rows.positions)
        self._cos = angles[:, 0].unsqueeze(1)
        # Rotating a half is a roll once the sign is in the sine: x * cos + roll(x) * [-sin, sin].
        self._signed_sin = angles[:, 1].unsqueeze(1).clone()
        self._signed_sin[..., : self._head_dim // 2].neg_()
        blocks, offsets = rows.slot_mapping // self._block_size, rows.slot_mapping % self._block_size
        self._written = (self._tile_index(blocks) * self._block_size + offsets.view(-1, 1, 1)).flatten()
        opened = self._tile_index(blocks[offsets == 0]).flatten()
        self._opened = opened if opened.numel() else None

    def rope_write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotated = self._rotate(torch.cat((q, k), dim=1))
        num_heads = q.shape[1]
        written = self._stored(layer, rotated[:, num_heads:], v)
        if self._opened is not None:
            self._tiles.index_fill_(0, self._opened + self._layer_offset(layer), 0)
        vectors = written.view(-1, self._head_dim)
        self._vectors.index_copy_(0, self._written + self._layer_offset(layer) * self._block_size, vectors)
        return rotated[:, :num_heads].to(q.dtype)

    def attention(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        if window not in self._groups:
            self._groups[window] = self._make_groups(window, q.dtype)
        groups = self._groups[window]
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return self._attend(layer, q, groups[0])
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in groups:
            out[group.rows] = self._attend(layer, q[group.rows], group)
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotates x [num_tokens, heads, head_dim] in float32; the caller rounds it, once."""
        wide = x.float()
        return torch.addcmul(wide * self._cos, wide.roll(self._head_dim // 2, -1), self._signed_sin)

    def _stored(self, layer: int, rotated_k: Tensor, v: Tensor) -> Tensor:
        """[num_tokens, 2, num_kv_heads, head_dim] as cached. rotated_k: float32; v: in the model's dtype."""
        if self._kv_scales is None:
            return torch.stack((rotated_k.to(v.dtype), v), dim=1)
        return to_fp8(torch.stack((rotated_k, v.float()), dim=1), self._kv_scales[layer].unsqueeze(-1))

    def _read(self, layer: int, group: _AttentionGroup, dtype: torch.dtype) -> Tensor:
        """K and V of the group in `dtype`: [2, num_sequences, num_kv_heads, positions of its blocks, head_dim]."""
        tiles = self._tiles.index_select(0, group.tiles + self._layer_offset(layer))
        tiles = tiles.view(2, group.num_sequences, self._num_kv_heads, -1, self._head_dim)
        if self._kv_scales is None:
            return tiles
        return from_fp8(tiles, self._kv_scales[layer][:, None, :, None, None], dtype)

    def _attend(self, layer: int, q: Tensor, group: _AttentionGroup) -> Tensor:
        """q: [num_sequences * num_rows, num_heads, head_dim] -> [num_sequences * num_rows, num_heads * head_dim]."""
        sequences, rows, heads, dim = group.num_sequences, group.num_rows, self._num_kv_heads, self._head_dim
        group_size = q.shape[1] // heads
        keys, values = self._read(layer, group, q.dtype)[:, :, :, group.keys]
        mask = None if group.mask is None else group.mask.unsqueeze(1)
        if rows == 1:
            # The query heads of a KV head are the rows of one small product.
            q = q.view(sequences, heads, group_size, dim)
            mask = None if mask is None else mask.expand(-1, -1, group_size, -1)
            out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self._scale)
            return out.reshape(sequences, -1)
        # One sequence: its KV heads become the batch, so that the heads sharing one read it without a copy.
        q = q.view(rows, heads, group_size, dim).permute(1, 2, 0, 3)
        keys, values = (side.view(heads, 1, -1, dim).expand(-1, group_size, -1, -1) for side in (keys[0], values[0]))
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self._scale)
        return out.permute(2, 0, 1, 3).reshape(rows, -1)

    def _make_groups(self, window: int | None, dtype: torch.dtype) -> list[_AttentionGroup]:
        """Chunks in tiles of rows; single rows together with others whose contexts have about as many blocks.

        `dtype`: the queries' dtype.
        """
        starts, contexts = self._rows.query_starts.tolist(), self._rows.context_lens.tolist()
        groups = []
        single: dict[int, list[int]] = {}
        for sequence, context in enumerate(contexts):
            begin, end = starts[sequence], starts[sequence + 1]
            if end - begin == 1:
                blocks = (min(context, window or context) - 1) // self._block_size + 1
                # By number of bits, so that padding to the longest of a group at most doubles the shortest.
                single.setdefault(blocks.bit_length(), []).append(sequence)
            for tile in range(begin, end if end - begin > 1 else begin, _QUERY_TILE):
                stop = min(tile + _QUERY_TILE, end)
                groups.append(self._make_group([sequence], slice(tile, stop), context - (end - stop), window, dtype))
        for sequences in single.values():
            rows = [starts[sequence] for sequence in sequences]
            adjacent = rows[-1] - rows[0] == len(rows) - 1
            index = slice(rows[0], rows[-1] + 1) if adjacent else self._rows.positions.new_tensor(rows)
            groups.append(self._make_group(sequences, index, max(contexts[s] for s in sequences), window, dtype))
        return groups

    def _make_group(
        self, sequences: list[int], rows: Tensor | slice, end: int, window: int | None, dtype: torch.dtype
    ) -> _AttentionGroup:
        """`end`: the last position of any row, plus one."""
        size, device = self._block_size, self._tiles.device
        positions = self._rows.positions[rows].view(len(sequences), -1)
        # All blocks from the first one that a sequence's first row sees to that of its last row.
        first = (
            torch.zeros_like(positions[:, :1]) if window is None else (positions[:, :1] - window + 1).clamp_(0) // size
        )
        last = positions[:, -1:] // size
        columns = first + torch.arange(int((last - first).max()) + 1, device=device)
        # A shorter sequence is padded with a block of its own, so that no NaN of another sequence gets in.
        tables = self._rows.block_tables[sequences].gather(1, columns.minimum(last))
        tiles = self._tile_index(tables).permute(2, 0, 3, 1).reshape(-1)
        keys = slice(0, end - int(first.min()) * size if len(sequences) == 1 else columns.shape[1] * size)
        key_positions = (columns.unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(1)[:, None, keys]
        hidden = key_positions > positions.unsqueeze(-1)
        if window is not None:
            hidden |= key_positions <= positions.unsqueeze(-1) - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        return _AttentionGroup(
            num_sequences=len(sequences),
            num_rows=positions.shape[1],
            rows=rows,
            tiles=tiles,
            keys=keys,
            mask=mask if bool(hidden.any()) else None,
        )

    def _tile_index(self, blocks: Tensor) -> Tensor:
        """Tiles of layer 0: blocks [...] -> [..., 2, num_kv_heads]."""
        within = torch.arange(2 * self._num_kv_heads, device=blocks.device).view(2, self._num_kv_heads)
        return blocks[..., None, None] * (self._num_layers * 2 * self._num_kv_heads) + within

    def _layer_offset(self, layer: int) -> int:
        """Distance in tiles from layer 0 to `layer`."""
        return layer * 2 * self._num_kv_heads
