"""Lists in pages, as OpenAI's API has them: `limit`, `order`, and `after` with the last id of the page before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from aiohttp import web

from pdserve.base.errors import RequestError

Item = TypeVar("Item")


def integer(request: web.Request, name: str, default: int, *, at_least: int, at_most: int) -> int:
    """A number in the query. Raises `RequestError`."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = int(text[:20])
    except ValueError:
        value = at_least - 1
    if not at_least <= value <= at_most:
        raise RequestError(f"`{name}` must be an integer from {at_least} to {at_most}.", param=name)
    return value


def order(request: web.Request) -> str:
    """`asc` or `desc`, which is the default. Raises `RequestError`."""
    value = request.query.get("order", "desc")
    if value not in ("asc", "desc"):
        raise RequestError("`order` must be asc or desc.", param="order")
    return value


def page_of(items: Sequence[Item], ids: Sequence[str], *, after: str | None, limit: int) -> tuple[list[Item], bool]:
    """The items behind the one with the id `after`, at most `limit`, and whether there are more.

    Raises `RequestError` for an id that none has.
    """
    if after is not None and after not in ids:
        raise RequestError("`after` is the id of nothing in this list.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    return list(items[start : start + limit]), start + limit < len(items)


def page_object(shown: Sequence[Any], *, has_more: bool) -> dict[str, Any]:
    """The page as clients get it. The items have ids."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }
