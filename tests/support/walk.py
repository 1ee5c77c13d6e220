"""The files whose coroutines a request passes: what a reader who follows it has to open."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Coroutine, Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("router_svc", "prefill_svc", "decode_svc", "kvtransfer", "pdserve")
_COROUTINES = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


async def files_entered(work: Awaitable[object]) -> dict[str, set[str]]:
    """The files of which `work`, and what serves it, enters coroutines, with their names.

    Tasks of ours that run already, and those that they start, are the services' background.
    """
    loop, entered = asyncio.get_running_loop(), set[CodeType]()
    background = {task for task in asyncio.all_tasks() if _path_of(task.get_coro()) is not None}
    background.discard(_current_task())

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_flags & _COROUTINES and _current_task() not in background:
            entered.add(frame.f_code)

    def start(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        if _current_task() in background:
            background.add(task)
        return task

    factory = loop.get_task_factory()
    loop.set_task_factory(start)
    sys.setprofile(note)
    try:
        await work
    finally:
        sys.setprofile(None)
        loop.set_task_factory(factory)
    found: dict[str, set[str]] = {}
    for code in entered:
        if (path := _relative(code)) is not None:
            found.setdefault(path, set()).add(code.co_qualname)
    return found


def _current_task() -> asyncio.Task[Any]:
    """None in a callback of the event loop, which is in no set of tasks."""
    return asyncio.current_task()  # type: ignore[return-value]


def _path_of(coroutine: Coroutine[Any, Any, Any] | Generator[Any, Any, Any] | None) -> str | None:
    code = getattr(coroutine, "cr_code", None)
    return None if code is None else _relative(code)


def _relative(code: CodeType) -> str | None:
    """The path of code of the product, from the root; None: it is of somebody else."""
    path = code.co_filename.removeprefix(f"{ROOT}/")
    return path if path.startswith(tuple(f"{package}/" for package in PACKAGES)) else None
