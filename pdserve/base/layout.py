"""The layout of KV blocks, which must be the same on two workers that exchange them.

The layers of a model form groups. The layers of a group have KV of one shape and keep it for as long as one another, so
that one block table serves all of them. Blocks of all groups have the same number of bytes: one pool allocates them,
and a block id is a range of bytes whichever group holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.base.errors import LayoutMismatch, SetupError

#: Types of KV, with their bytes per number.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


class KvGroupKind(StrEnum):
    """What the layers of a group keep. Values travel between workers."""

    #: K and V of all tokens.
    FULL = "full"
    #: K and V of the last tokens.
    WINDOW = "window"


def first_block_read(window: int | None, position: int, block_size: int) -> int:
    """Index of the first block that tokens from `position` on attend to, each to `window` tokens or (None) to all."""
    return 0 if window is None else max(0, position - window + 1) // block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers whose KV is kept alike. A block of theirs is `[num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    kind: KvGroupKind = KvGroupKind.FULL
    #: Indices of the model's layers, ascending.
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    #: Tokens that a token attends to, itself included; None: all.
    window: int | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def elements_per_token(self) -> int:
        """Numbers that a token stores."""
        return len(self.layers) * 2 * self.num_kv_heads * self.head_dim

    def fault(self) -> str | None:
        """What no group can be like; None for a possible one."""
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            return f"layers {_ranges(self.layers)} are not one or more, ascending"
        if min(self.num_kv_heads, self.head_dim) < 1:
            return f"num_kv_heads {self.num_kv_heads} or head_dim {self.head_dim} is below 1"
        is_windowed = self.window is not None
        if (self.kind is KvGroupKind.WINDOW) != is_windowed or (self.window is not None and self.window < 1):
            return f"kind {self.kind.value!r} has a window of {self.window} tokens"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape and meaning of blocks. Raises `ValueError` for groups that no model can have.

    `model` is a fingerprint of config, weights and the scales of an fp8 cache, not a name chosen by a user. The number
    of ranks is not included, for a block has all heads.
    """

    model: str
    dtype: str
    block_size: int
    groups: tuple[KvGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("A KV layout needs at least one group of layers.")
        for index, group in enumerate(self.groups):
            if fault := group.fault():
                raise ValueError(f"KV group {index} is impossible: {fault}.")
        if len(self.groups) > 1:
            self._require_one_size()

    @classmethod
    def uniform(
        cls, *, model: str, dtype: str, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> KvLayout:
        """The layout of a model whose layers are all alike and attend to all tokens: one group."""
        group = KvGroup(layers=tuple(range(num_layers)), num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(model=model, dtype=dtype, block_size=block_size, groups=(group,))

    @property
    def block_bytes(self) -> int:
        """Bytes per block, over all layers of its group."""
        return self.groups[0].elements_per_token * self.block_size * DTYPES[self.dtype]

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        """Whether `uniform` makes it. Workers that know no groups have such layouts only."""
        group = self.groups[0]
        is_first = group.layers == tuple(range(len(group.layers)))
        return len(self.groups) == 1 and group.kind is KvGroupKind.FULL and is_first

    @property
    def only_group(self) -> KvGroup:
        """The group of all layers.

        Raises: SetupError when there are several or it has a window: kernels and decoders compute uniform ones alone.
        """
        if not self.is_uniform:
            shown = "; ".join(_described(group) for group in self.groups)
            raise SetupError(
                f"This version computes models whose layers all keep K and V of all tokens, in one shape. This model "
                f"has KV in {len(self.groups)} groups: {shown}."
            )
        return self.groups[0]

    def with_heads_divided(self, num_ranks: int) -> KvLayout:
        """The layout of one rank's blocks, which have its heads alone."""
        groups = tuple(replace(group, num_kv_heads=group.num_kv_heads // num_ranks) for group in self.groups)
        return replace(self, groups=groups)

    def differences(self, other: KvLayout) -> Iterator[tuple[str, object, object]]:
        """Every field that differs: its name, its value here, and its value there; None where it is absent."""
        show = _uniform_fields if self.is_uniform and other.is_uniform else _grouped_fields
        mine, theirs = show(self), show(other)
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                yield name, mine.get(name), theirs.get(name)

    def require_equal(self, other: KvLayout) -> None:
        """Raises `LayoutMismatch`, which names every field that differs, with its group if there are several."""
        if self == other:
            return
        different = "; ".join(
            f"{name} is {mine!r} here and {theirs!r} there" for name, mine, theirs in self.differences(other)
        )
        raise LayoutMismatch(f"KV layouts differ: {different}. Start both tiers with the same model and flags.")

    def _require_one_size(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        if len(set(layers)) < len(layers):
            raise ValueError(f"A layer is in two KV groups: {'; '.join(_described(group) for group in self.groups)}.")
        sizes = [group.elements_per_token for group in self.groups]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"Blocks of all KV groups must have the same size, but their tokens have {sizes} numbers. Divide the "
                "layers into groups of equal size."
            )


def _uniform_fields(layout: KvLayout) -> dict[str, object]:
    group = layout.groups[0]
    return {
        **_common_fields(layout),
        "num_layers": group.num_layers,
        "num_kv_heads": group.num_kv_heads,
        "head_dim": group.head_dim,
    }


def _grouped_fields(layout: KvLayout) -> dict[str, object]:
    fields = _common_fields(layout)
    for index, group in enumerate(layout.groups):
        values = {
            "kind": group.kind.value,
            "window": group.window,
            "layers": _ranges(group.layers),
            "num_kv_heads": group.num_kv_heads,
            "head_dim": group.head_dim,
        }
        fields |= {f"{name} of group {index}": value for name, value in values.items()}
    return fields


def _common_fields(layout: KvLayout) -> dict[str, object]:
    return {"model": layout.model, "dtype": layout.dtype, "block_size": layout.block_size}


def _described(group: KvGroup) -> str:
    window = "" if group.window is None else f" of {group.window} tokens"
    return f"{group.kind.value}{window}, layers {_ranges(group.layers)}, {group.num_kv_heads} heads of {group.head_dim}"


def _ranges(layers: tuple[int, ...]) -> str:
    """Layers as text: `0-4,6,11`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs)
