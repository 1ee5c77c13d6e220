"""The layout of KV blocks, which must be the same on two workers that exchange them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pdserve.base.errors import LayoutMismatch

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape and meaning of one block: `[num_layers, 2, num_kv_heads, block_size, head_dim]` of `dtype`.

    `model` is a fingerprint of config, weights and the scales of an fp8 cache, not a name chosen by a user. The number
    of ranks is not included, for a block has all heads.
    """

    model: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def block_bytes(self) -> int:
        """Bytes per block, over all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * _DTYPE_BYTES[self.dtype]

    def require_equal(self, other: KvLayout) -> None:
        """Raises `LayoutMismatch`, which names every field that differs."""
        mine, theirs = asdict(self), asdict(other)
        different = [
            f"{name} is {mine[name]!r} here and {theirs[name]!r} there" for name in mine if mine[name] != theirs[name]
        ]
        if different:
            raise LayoutMismatch(
                f"KV layouts differ: {'; '.join(different)}. Start both tiers with the same model and flags."
            )
