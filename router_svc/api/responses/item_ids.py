"""Ids of items. An id says where its item is, so that a request can refer to it without an index of all items."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: By the type of an item: the start of its id.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_RESPONSE = "resp_"
_ID = re.compile(r"[a-z]{1,8}_([A-Za-z0-9._-]{1,160})-([io])([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPosition:
    """Where an item is: among the items before a response, or in its output."""

    response_id: str
    is_input: bool
    index: int


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    """The id of an item, equal on any router."""
    start = _PREFIXES.get(kind, "item")
    return f"{start}_{response_id.removeprefix(_RESPONSE)}-{'i' if is_input else 'o'}{index}"


def position_of(given: str) -> ItemPosition | None:
    """Where the item of an id is; None: it is no id of this server."""
    found = _ID.fullmatch(given)
    if found is None:
        return None
    response, kind, index = found.groups()
    return ItemPosition(response_id=_RESPONSE + response, is_input=kind == "i", index=int(index))
