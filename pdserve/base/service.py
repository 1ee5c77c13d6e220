"""How every service process starts and ends: settings, logs, one event loop, one readable line when it cannot start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdserve.base import logs, notify
from pdserve.base.config import load
from pdserve.base.errors import SetupError

Config = TypeVar("Config")


def run_service(
    config_class: type[Config],
    service: str,
    serve: Callable[[Config], Awaitable[None]],
    *,
    log_level: Callable[[Config], str],
    description: str,
) -> None:
    """The `__main__` of one service. Exit code 1 with `error: ...` on standard error for a `SetupError`."""
    try:
        config = load(config_class, service, description=description)
        logs.configure(service, log_level(config))
        asyncio.run(_main(serve(config)))
    except SetupError as error:
        notify.notify(f"STATUS=error: {error}")
        sys.exit(f"error: {error}")


async def _main(work: Awaitable[None]) -> None:
    await work
