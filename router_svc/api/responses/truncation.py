"""Conversations that are too long for the context, from which the earliest items are left out (`truncation: auto`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pdserve.base.errors import ContextExceeded
from router_svc.api.responses.items import (
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
)

Result = TypeVar("Result")


async def fitted(items: Sequence[Item], attempt: Callable[[Sequence[Item]], Awaitable[Result]]) -> Result:
    """The result of the attempt with all items, else with as many of the latest ones as fit.

    What system and developer say at the start stays. By preference, the first of the others is a message of the user,
    which many templates need. Raises `ContextExceeded` if even the last item does not fit, and what the attempt raises.
    """
    try:
        return await attempt(items)
    except ContextExceeded as error:
        too_long = error
    first, cuts = _cuts(items)
    for candidates in ([cut for cut in cuts if _is_of_user(items[cut])], cuts):
        found, low, high = None, 0, len(candidates) - 1
        # The earliest cut that fits: a later one leaves fewer items.
        while low <= high:
            middle = (low + high) // 2
            try:
                found = (await attempt([*items[:first], *items[candidates[middle] :]]),)
                high = middle - 1
            except ContextExceeded as error:
                too_long = error
                low = middle + 1
        if found is not None:
            return found[0]
    raise too_long


def _cuts(items: Sequence[Item]) -> tuple[int, list[int]]:
    """The first item that may be left out, and where what is kept may start.

    No output of a call is kept without the call, and nothing without the thinking before it.
    """
    first = next((index for index, item in enumerate(items) if not _is_of_system(item)), len(items))
    last_outputs = {item.call_id: index for index, item in enumerate(items) if isinstance(item, CallOutputItem)}
    cuts, open_until = [], -1
    for index in range(first + 1, len(items)):
        before = items[index - 1]
        if isinstance(before, FunctionCallItem | CustomToolCallItem):
            open_until = max(open_until, last_outputs.get(before.call_id, -1))
        if (
            index > open_until
            and not isinstance(before, ReasoningItem)
            and not isinstance(items[index], CallOutputItem)
        ):
            cuts.append(index)
    return first, cuts


def _is_of_system(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _is_of_user(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"
