"""Start and end of every service process: settings, logs, one event loop, one readable line when it cannot start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pdserve.base import logs, notify
from pdserve.base.config import load
from pdserve.base.errors import SetupError


class ServiceConfig(Protocol):
    """The settings that every service has."""

    @property
    def log_level(self) -> str:
        """Level from which on messages are logged."""


Config = TypeVar("Config", bound=ServiceConfig)


def run_service(
    config_class: type[Config],
    service: str,
    serve: Callable[[Config], Awaitable[None]],
    *,
    description: str,
) -> None:
    """Runs one service. A `SetupError` ends the process with exit code 1 and `error: ...` on standard error."""
    try:
        config = load(config_class, service, description=description)
        logs.configure(service, config.log_level)
        asyncio.run(_main(serve(config)))
    except SetupError as error:
        notify.notify(f"STATUS=error: {error}")
        sys.exit(f"error: {error}")


async def _main(work: Awaitable[None]) -> None:
    await work
