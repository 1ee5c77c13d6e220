"""A conversation that is too long loses its earliest items, and what is left is one that a template takes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import ContextExceeded
from router_svc.api.responses.items import (
    CallOutputItem,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    read_items,
)
from router_svc.api.responses.truncation import fitted


def _read(text: str) -> list[Item]:
    """Items by letters: system, user, assistant, thinking, and calls and outputs with their ids behind them."""
    kinds: dict[str, dict[str, Any]] = {
        "s": {"role": "system", "content": "s"},
        "u": {"role": "user", "content": "u"},
        "a": {"role": "assistant", "content": "a"},
        "t": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
    }
    items = []
    for each in text.split():
        call = {"call_id": each[1:], "name": "put", "arguments": "{}", "output": "done"}
        kind = {"c": "function_call", "o": "function_call_output"}.get(each[0])
        items.append(kinds[each] if kind is None else call | {"type": kind})
    return read_items(items)


def _fitted(items: Sequence[Item], limit: int) -> list[Item]:
    async def attempt(given: Sequence[Item]) -> list[Item]:
        if len(given) > limit:
            raise ContextExceeded("It is too long.")
        return [*given]

    return asyncio.run(fitted(items, attempt))


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [
        ("u a u", 3, "u a u"),
        ("u a u", 2, "u"),
        ("s u a u a u", 4, "s u a u"),
        ("s s u a u", 3, "s s u"),
        # A message of the user first, if that fits; else anything that has all before it that it needs.
        ("u a u t c1 o1 a", 5, "u t c1 o1 a"),
        ("u t c1 o1 t c2 o2", 6, "t c1 o1 t c2 o2"),
        ("u t c1 o1 t c2 o2", 5, "t c2 o2"),
        ("u c1 c2 o1 o2 a", 5, "c1 c2 o1 o2 a"),
        ("u c1 c2 o1 o2 a", 4, "a"),
        ("u c1 u o1 u", 4, "u"),
    ],
)
def test_the_earliest_items_are_left_out(text: str, limit: int, kept: str) -> None:
    assert _fitted(_read(text), limit) == _read(kept)


def test_what_cannot_fit_is_refused() -> None:
    for text in ("u", "s u", "u c1 o1"):
        with pytest.raises(ContextExceeded):
            _fitted(_read(text), 1 if text != "u" else 0)


_TURN = st.sampled_from(["u", "a", "t a", "c1 o1", "t c2 c3 o3 o2", "u a"])


@given(st.lists(_TURN, min_size=1, max_size=8).map(" ".join), st.integers(1, 20))
def test_no_output_is_without_its_call_and_nothing_is_changed(text: str, limit: int) -> None:
    items = _read(f"s {text}")
    try:
        kept = _fitted(items, limit)
    except ContextExceeded:
        return
    assert kept[0] == items[0]
    assert kept[1:] == items[len(items) - len(kept) + 1 :]
    calls: set[str] = set()
    for before, item in itertools.pairwise(kept):
        assert not isinstance(before, ReasoningItem) or isinstance(item, MessageItem | FunctionCallItem)
        if isinstance(item, FunctionCallItem):
            calls.add(item.call_id)
        assert not isinstance(item, CallOutputItem) or item.call_id in calls
