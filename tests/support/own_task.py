"""A context manager that is entered and left in one task, for fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def in_own_task(manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enters and leaves `manager` in one task. Task groups need that, and pytest runs fixtures in several."""
    opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    close = asyncio.Event()

    async def hold() -> None:
        try:
            async with manager as value:
                opened.set_result(value)
                await close.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    task = asyncio.create_task(hold())
    try:
        yield await opened
    finally:
        close.set()
        await task
