"""A waiter never misses a change."""

from __future__ import annotations

import asyncio

from pdserve.base.changes import Changes


async def test_a_waiter_that_names_its_last_version_misses_no_change() -> None:
    changes = Changes()
    seen = changes.version
    changes.bump()
    assert await changes.wait(seen) == seen + 1
    waiter = asyncio.create_task(changes.wait(changes.version))
    await asyncio.sleep(0)
    assert not waiter.done()
    changes.bump()
    assert await waiter == changes.version
