"""Patches between states."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_svc.api.console.merge_patch import merge_patch

_VALUES = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.text(max_size=2), _VALUES, max_size=4)


def apply(target: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply(result.get(name), value)
    return result


@given(_OBJECTS, _OBJECTS)
def test_a_patch_makes_the_new_state_of_the_old_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert apply(old, merge_patch(old, new)) == new


@given(_OBJECTS)
def test_equal_states_have_an_empty_patch(state: dict[str, Any]) -> None:
    assert merge_patch(state, state) == {}


@pytest.mark.parametrize(
    ("old", "new", "patch"),
    [
        ({"w": {"a": 1, "b": 2}}, {"w": {"a": 1, "b": 3}}, {"w": {"b": 3}}),
        ({"w": {"a": 1}}, {"w": {}}, {"w": {"a": None}}),
        ({"problems": [1, 2]}, {"problems": [1]}, {"problems": [1]}),
    ],
)
def test_a_patch_has_only_what_changed(old: dict[str, Any], new: dict[str, Any], patch: dict[str, Any]) -> None:
    assert merge_patch(old, new) == patch
