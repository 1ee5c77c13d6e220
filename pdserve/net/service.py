"""Start and end of every service process: settings, logs, one event loop, one readable line when it cannot start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from pdserve.base import logs
from pdserve.base.config import load
from pdserve.base.errors import SetupError
from pdserve.net import notify
from pdserve.observe.audit import audit_file
from pdserve.observe.open_files import AcceptErrors, raise_limit

log = logs.get_logger(__name__)


class ServiceConfig(Protocol):
    """The settings that every service has."""

    @property
    def log_level(self) -> str:
        """Level from which on messages are logged."""

    @property
    def log_format(self) -> str:
        """Form of log lines, one of `logs.FORMATS`."""

    @property
    def audit_log(self) -> str | None:
        """File of the audit log; None: the log of the process."""


Config = TypeVar("Config", bound=ServiceConfig)


def run_service(
    config_class: type[Config],
    service: str,
    serve: Callable[[Config], Awaitable[None]],
    *,
    description: str,
) -> None:
    """Runs one service. A `SetupError` ends the process with exit code 1 and `error: ...` on standard error."""
    is_json = False
    try:
        config = load(config_class, service, description=description)
        logs.configure(service, config.log_level, config.log_format)
        is_json = config.log_format == "json"
        with audit_file(config.audit_log, service):
            raise_limit()
            asyncio.run(_main(serve(config)))
    except SetupError as error:
        notify.notify(f"STATUS=error: {error}")
        if is_json:
            log.error("cannot_start", error=error)
            sys.exit(1)
        sys.exit(f"error: {error}")
    except Exception as error:
        if is_json:  # The interpreter would print the traceback as lines that are no objects.
            log.error("service_died", exc=error)
            sys.exit(1)
        raise


async def _main(work: Awaitable[None]) -> None:
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    await work
