"""Which router may write a stream, when both write it again because Redis has lost it."""

from __future__ import annotations

import pytest

from pdserve.redis.store import Argument, Store
from router_svc.records.stream_scripts import APPEND, START, TAKEN, WRITE

_TTL_MS = 60_000
_NONCE = "ab" * 8
OLD, NEW = 1, 2


async def write(store: Store, kind: str, fence: int, *values: Argument) -> bytes:
    """The answer to one write of the router with this fence."""
    arguments: list[Argument] = [kind, _NONCE, fence, *values, *[""] * (3 - len(values))]
    [answer] = await store.script(
        WRITE, keys=["pd:stream:o:r", "pd:stream-output:o:r"], arguments=[_TTL_MS, *arguments]
    )
    return bytes(answer)


async def start(store: Store, fence: int) -> bytes:
    return await write(store, START, fence, "request", "", "")


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD)])
async def test_the_router_that_resumed_a_lost_stream_keeps_it(router_store: Store, order: tuple[int, int]) -> None:
    for fence in order:
        await start(router_store, fence)
    assert await write(router_store, APPEND, OLD, 0, "late") == TAKEN
    assert await write(router_store, APPEND, NEW, 0, "piece") == b""
    assert await router_store.call("LRANGE", "pd:stream-output:o:r", "0", "-1") == [b"piece"]


async def test_a_router_that_comes_late_with_a_lost_stream_learns_so(router_store: Store) -> None:
    assert await start(router_store, NEW) == b""
    assert await start(router_store, OLD) == TAKEN
    assert await start(router_store, NEW) == b""
