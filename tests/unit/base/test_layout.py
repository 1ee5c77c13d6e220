"""KV layouts: which can exist, how two of them differ, and how they travel."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import LayoutMismatch, RequestError, SetupError
from pdserve.base.layout import KvGroup, KvGroupKind, KvLayout
from pdserve.base.layout_wire import (
    MAX_LAYERS,
    layout_from_proto,
    layout_from_record,
    layout_to_proto,
    layout_to_record,
)
from pdserve.v1 import decode_pb2 as pb
from tests.support.groups import FULL_GROUP, TWO_GROUPS, WINDOW_GROUP

UNIFORM = KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
#: What v0.1.0 sends and stores for `UNIFORM`.
WIRE_OF_UNIFORM = bytes.fromhex("0a016d120862666c6f617431361810201e28033040")
RECORD_OF_UNIFORM = (
    '{"model": "m", "dtype": "bfloat16", "block_size": 16, "num_layers": 30, "num_kv_heads": 3, "head_dim": 64}'
)


def with_groups(*groups: KvGroup) -> KvLayout:
    return replace(TWO_GROUPS, groups=groups)


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    """Layouts of up to three groups whose layers are interleaved."""
    num_groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(num_groups * per_group)))
    groups = []
    for index in range(num_groups):
        window = draw(st.none() | st.integers(1, 99))
        kind = KvGroupKind.FULL if window is None else KvGroupKind.WINDOW
        layers = tuple(sorted(order[index * per_group : (index + 1) * per_group]))
        groups.append(KvGroup(kind=kind, window=window, layers=layers, num_kv_heads=2, head_dim=8))
    return KvLayout(model="m", dtype="float16", block_size=4, groups=tuple(groups))


def test_a_uniform_layout_has_the_bytes_of_the_version_without_groups() -> None:
    """Fails if a uniform layout is sent or stored as a list of one group."""
    assert layout_to_proto(UNIFORM).SerializeToString() == WIRE_OF_UNIFORM
    assert json.dumps(layout_to_record(UNIFORM)) == RECORD_OF_UNIFORM
    assert layout_from_proto(pb.KvLayout.FromString(WIRE_OF_UNIFORM)) == UNIFORM
    assert layout_from_record(RECORD_OF_UNIFORM.encode()) == UNIFORM


def test_a_version_without_groups_refuses_other_layouts() -> None:
    """It takes 1 to 2**20 in each of these fields. Fails if they are filled in from the first group."""
    message = layout_to_proto(TWO_GROUPS)
    assert (message.num_layers, message.num_kv_heads, message.head_dim) == (0, 0, 0)
    record = layout_to_record(TWO_GROUPS)
    assert (record["num_layers"], record["num_kv_heads"], record["head_dim"]) == (0, 0, 0)


@given(layouts())
def test_every_layout_survives_the_wire_and_the_registry(layout: KvLayout) -> None:
    """Fails if the window or the indices of the layers are not sent."""
    wire = layout_to_proto(layout).SerializeToString()
    assert layout_from_proto(pb.KvLayout.FromString(wire)) == layout
    assert layout_from_record(json.dumps(layout_to_record(layout)).encode()) == layout


def _uniform_in_groups(message: pb.KvLayout) -> None:
    del message.groups[1]
    message.groups[0].layers[:] = [0, 1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.groups[1], "kind", "state"), "groups.kind"),
        (lambda m: setattr(m.groups[1], "window", 0), "window"),
        (lambda m: setattr(m.groups[0], "window", 8), "window"),
        (lambda m: setattr(m.groups[1], "head_dim", 0), "groups.head_dim"),
        (lambda m: setattr(m.groups[1], "head_dim", 8), "same size"),
        (lambda m: setattr(m.groups[1], "num_kv_heads", 1 << 21), "groups.num_kv_heads"),
        (lambda m: m.groups[1].layers.__setitem__(1, 2), "two KV groups"),
        (lambda m: m.groups[1].layers.__setitem__(0, 9), "ascending"),
        (lambda m: m.groups[1].layers.extend(range(5, MAX_LAYERS + 5)), "layers of layout.groups"),
        (lambda m: setattr(m, "num_layers", 4), "num_layers beside groups"),
        (lambda m: setattr(m, "block_size", 0), "block_size"),
        (lambda m: setattr(m, "dtype", "int3"), "dtype"),
        (_uniform_in_groups, "fields of its own"),
    ],
)
def test_malformed_groups_are_refused_by_name(change: Callable[[pb.KvLayout], None], named: str) -> None:
    """Fails if groups are taken as they are sent."""
    message = layout_to_proto(TWO_GROUPS)
    change(message)
    with pytest.raises(RequestError, match=named):
        layout_from_proto(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 4),
        ("groups", []),
        ("groups", None),
        ("groups", [{"kind": "state", "window": None, "layers": [0], "num_kv_heads": 1, "head_dim": 1}]),
        ("groups", [{"kind": "window", "window": None, "layers": [0], "num_kv_heads": 1, "head_dim": 1}]),
        ("groups", [{"kind": "full", "window": None, "layers": [0], "num_kv_heads": 1, "head_dim": 1}]),
        ("groups", [{"kind": "full", "window": None, "layers": [1, 0], "num_kv_heads": 1, "head_dim": 1}]),
        ("more", 1),
    ],
)
def test_malformed_groups_in_the_registry_are_refused(field: str, value: object) -> None:
    """Fails if records are taken as they are stored."""
    with pytest.raises(ValueError):
        layout_from_record(json.dumps({**layout_to_record(TWO_GROUPS), field: value}).encode())


def test_layers_beyond_any_model_are_not_listed() -> None:
    """A few bytes of a stranger would become megabytes. Fails without `MAX_LAYERS`."""
    message = layout_to_proto(replace(UNIFORM, dtype="fp8_e4m3"))
    message.num_layers, message.num_kv_heads, message.head_dim, message.block_size = MAX_LAYERS + 1, 1, 1, 1
    with pytest.raises(RequestError, match="num_layers"):
        layout_from_proto(message)
    with pytest.raises(ValueError, match="num_layers"):
        layout_from_record(RECORD_OF_UNIFORM.replace("30", str(MAX_LAYERS + 1)).encode())


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ((), "at least one group"),
        ((replace(FULL_GROUP, layers=()),), "group 0"),
        ((FULL_GROUP, replace(WINDOW_GROUP, layers=(0, 1, 3, 3))), "group 1"),
        ((FULL_GROUP, replace(WINDOW_GROUP, layers=(0, 1, 2, 3))), "two KV groups"),
        ((FULL_GROUP, replace(WINDOW_GROUP, layers=(0, 1, 3))), "same size"),
        ((replace(FULL_GROUP, window=5),), "window"),
        ((replace(WINDOW_GROUP, window=None),), "window"),
        ((replace(WINDOW_GROUP, window=0),), "window"),
    ],
)
def test_groups_that_no_model_has_are_refused_where_layouts_are_made(groups: tuple[KvGroup, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        with_groups(*groups)


def test_a_mismatch_names_the_group_and_the_field() -> None:
    """Fails if groups are compared as a whole."""
    other = with_groups(FULL_GROUP, replace(WINDOW_GROUP, window=7))
    with pytest.raises(LayoutMismatch, match=r"differ: window of group 1 is 6 here and 7 there. Start"):
        TWO_GROUPS.require_equal(other)
    TWO_GROUPS.require_equal(with_groups(*TWO_GROUPS.groups))


def test_a_mismatch_of_uniform_layouts_names_plain_fields() -> None:
    other = KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=28, num_kv_heads=3, head_dim=64)
    with pytest.raises(LayoutMismatch, match=r"differ: num_layers is 30 here and 28 there. Start"):
        UNIFORM.require_equal(other)


def test_a_group_that_only_one_side_has_is_named() -> None:
    uniform = replace(TWO_GROUPS, groups=(replace(FULL_GROUP, layers=(0, 1)),))
    with pytest.raises(LayoutMismatch, match="layers of group 0 is '2,5' here and '0-1' there; kind of group 1"):
        TWO_GROUPS.require_equal(uniform)


def test_blocks_of_all_groups_have_the_same_bytes() -> None:
    assert TWO_GROUPS.block_bytes == with_groups(WINDOW_GROUP).block_bytes == 2 * 2 * 2 * 4 * 4 * 4
    assert TWO_GROUPS.num_layers == 6


def test_a_rank_has_its_share_of_the_heads_of_each_group() -> None:
    """Fails if the heads of the first group alone are divided."""
    wide = with_groups(replace(FULL_GROUP, num_kv_heads=8), replace(WINDOW_GROUP, num_kv_heads=4))
    assert [group.num_kv_heads for group in wide.with_heads_divided(2).groups] == [4, 2]


@pytest.mark.parametrize("groups", [(FULL_GROUP, WINDOW_GROUP), (replace(WINDOW_GROUP, layers=(0, 1, 2, 3)),)])
def test_a_model_with_other_groups_is_refused_where_it_is_loaded(groups: tuple[KvGroup, ...]) -> None:
    """Fails if a window alone is taken for all tokens."""
    with pytest.raises(SetupError, match="window of 6 tokens"):
        _ = with_groups(*groups).only_group
