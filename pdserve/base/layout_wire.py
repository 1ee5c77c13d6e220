"""KV layouts as they travel between workers, and as they stand in the registry.

A layout that is `uniform` has the fields that it had before there were groups, and nothing else. Any other layout has
zeros in them, which a version without groups refuses as an impossible layout, and its groups in a field of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pdserve.base.errors import RequestError
from pdserve.base.layout import DTYPES, KvGroup, KvGroupKind, KvLayout
from pdserve.v1 import decode_pb2 as pb

MAX_BLOCK_BYTES = 1 << 30
#: Limit of layers, whose indices are listed.
MAX_LAYERS = 4096
_MAX_DIMENSION = 1 << 20
_MAX_WINDOW = (1 << 31) - 1
_KINDS = tuple(kind.value for kind in KvGroupKind)

_Layer = Annotated[int, Field(ge=0, le=_MAX_DIMENSION)]
_Dimension = Annotated[int, Field(ge=1, le=_MAX_DIMENSION)]


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    """The layout as it travels."""
    common = {"model": layout.model, "dtype": layout.dtype, "block_size": layout.block_size}
    if layout.is_uniform:
        return pb.KvLayout(**common, **_uniform_numbers(layout))  # type: ignore[arg-type] # each has its own type
    return pb.KvLayout(**common, groups=[_group_to_proto(group) for group in layout.groups])  # type: ignore[arg-type]


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    """The layout as it was sent. Raises: RequestError when no worker could have it."""
    _require_one_of("layout.dtype", message.dtype, DTYPES)
    _require_between("layout.block_size", message.block_size, 1, _MAX_DIMENSION)
    if not message.groups:
        return _uniform_from_proto(message)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        _require_between(f"layout.{name} beside groups", getattr(message, name), 0, 0)
    _require_between("layers of layout.groups", sum(len(group.layers) for group in message.groups), 1, MAX_LAYERS)
    try:
        groups = tuple(map(_group_from_proto, message.groups))
        layout = KvLayout(model=message.model, dtype=message.dtype, block_size=message.block_size, groups=groups)
    except ValueError as error:
        raise RequestError(f"Malformed layout: {error}") from None
    # One spelling of each layout: a version without groups must be able to read it.
    _require(not layout.is_uniform, "layout.groups has a single group of all layers, which has fields of its own")
    _require_between("block_bytes of layout", layout.block_bytes, 1, MAX_BLOCK_BYTES)
    return layout


def layout_to_record(layout: KvLayout) -> dict[str, object]:
    """The layout as it stands in the registry, to be written as JSON."""
    common = {"model": layout.model, "dtype": layout.dtype, "block_size": layout.block_size}
    if layout.is_uniform:
        return {**common, **_uniform_numbers(layout)}
    groups = [
        {
            "kind": group.kind.value,
            "window": group.window,
            "layers": list(group.layers),
            "num_kv_heads": group.num_kv_heads,
            "head_dim": group.head_dim,
        }
        for group in layout.groups
    ]
    return {**common, "num_layers": 0, "num_kv_heads": 0, "head_dim": 0, "groups": groups}


def layout_from_record(stored: bytes) -> KvLayout:
    """The layout from its JSON. Raises: `ValueError`, as pydantic's or plain, when no worker could have it."""
    found = _Layout.model_validate_json(stored)
    if found.groups is None:
        numbers = _Uniform.model_validate(found.model_dump(include={"num_layers", "num_kv_heads", "head_dim"}))
        return KvLayout.uniform(
            model=found.model, dtype=found.dtype, block_size=found.block_size, **numbers.model_dump()
        )
    if found.num_layers or found.num_kv_heads or found.head_dim:
        raise ValueError("a layout with groups has num_layers, num_kv_heads or head_dim of its own")
    groups = tuple(_group(group.model_dump()) for group in found.groups)
    layout = KvLayout(model=found.model, dtype=found.dtype, block_size=found.block_size, groups=groups)
    if layout.is_uniform:
        raise ValueError("a single group of all layers has fields of its own")
    return layout


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class _Group(_Stored):
    kind: Annotated[str, Field(max_length=32)]
    window: Annotated[int, Field(ge=1, le=_MAX_WINDOW)] | None
    layers: Annotated[list[_Layer], Field(min_length=1, max_length=MAX_LAYERS)]
    num_kv_heads: _Dimension
    head_dim: _Dimension


class _Uniform(_Stored):
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    num_kv_heads: _Dimension
    head_dim: _Dimension


class _Layout(_Stored):
    model: Annotated[str, Field(max_length=4096)]
    dtype: Annotated[str, Field(max_length=32)]
    block_size: _Dimension
    num_layers: int
    num_kv_heads: int
    head_dim: int
    groups: Annotated[list[_Group], Field(min_length=1, max_length=MAX_LAYERS)] | None = None


def _uniform_numbers(layout: KvLayout) -> dict[str, int]:
    group = layout.groups[0]
    return {"num_layers": group.num_layers, "num_kv_heads": group.num_kv_heads, "head_dim": group.head_dim}


def _uniform_from_proto(message: pb.KvLayout) -> KvLayout:
    numbers = {name: getattr(message, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    for name, value in numbers.items():
        _require_between(f"layout.{name}", value, 1, _MAX_DIMENSION)
    # Before the layers are listed.
    elements = 2 * message.num_layers * message.num_kv_heads * message.head_dim * message.block_size
    _require_between("block_bytes of layout", elements * DTYPES[message.dtype], 1, MAX_BLOCK_BYTES)
    _require_between("layout.num_layers", message.num_layers, 1, MAX_LAYERS)
    return KvLayout.uniform(model=message.model, dtype=message.dtype, block_size=message.block_size, **numbers)


def _group_to_proto(group: KvGroup) -> pb.KvGroup:
    return pb.KvGroup(
        kind=group.kind.value,
        window=group.window or 0,
        layers=group.layers,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
    )


def _group_from_proto(message: pb.KvGroup) -> KvGroup:
    _require_one_of("layout.groups.kind", message.kind, _KINDS)
    _require_between("layout.groups.window", message.window, 0, _MAX_WINDOW)
    for name in ("num_kv_heads", "head_dim"):
        _require_between(f"layout.groups.{name}", getattr(message, name), 1, _MAX_DIMENSION)
    return _group(
        {
            "kind": message.kind,
            "window": message.window or None,
            "layers": message.layers,
            "num_kv_heads": message.num_kv_heads,
            "head_dim": message.head_dim,
        }
    )


def _group(fields: Mapping[str, Any]) -> KvGroup:
    """Raises `ValueError` for a kind that this version does not know."""
    return KvGroup(**{**fields, "kind": KvGroupKind(fields["kind"]), "layers": tuple(fields["layers"])})


def _require_between(name: str, value: int, least: int, greatest: int) -> None:
    _require(least <= value <= greatest, f"{name} is {value}, not {least} to {greatest}")


def _require_one_of(name: str, value: str, known: Sequence[str] | Mapping[str, object]) -> None:
    _require(value in known, f"{name} {value!r} is not one of {', '.join(known)}")


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise RequestError(f"Malformed layout: {fault}.")
