"""The Redis that `pdserve up` uses: the user's, or a private one that it supervises."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pdserve.base.config import child_environment, variable
from pdserve.base.errors import SetupError
from pdserve.base.private_redis import find_redis_server, server_argv, wait_until_ready
from pdserve.base.store import is_reachable
from pdserve.cli.services import REDIS_STAGE
from pdserve.cli.supervisor.spec import ProcessSpec

_REACH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPlan:
    """Where Redis is, and what to start for it (None: the user runs it)."""

    url: str
    spec: ProcessSpec | None


@contextmanager
def planned_redis(redis_url: str | None, log_dir: Path) -> Iterator[RedisPlan]:
    """A plan for the user's Redis or a private one, whose directory is removed with the block.

    The private one listens on a Unix socket that only this user may open: on a TCP port any user of the machine could
    give it orders. Raises `SetupError` when there is no redis-server to start.
    """
    if redis_url is not None:
        yield RedisPlan(url=redis_url, spec=None)
        return
    binary = find_redis_server()
    # A session's runtime directory is emptied by the system, should we be killed before we can.
    directory = Path(tempfile.mkdtemp(prefix="pdserve-", dir=_runtime_dir()))
    try:
        yield _private(binary, directory, log_dir)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def require_reachable(redis_url: str) -> None:
    """Raises `SetupError` when the user's Redis does not answer: without it the router would never see a worker."""
    if not await is_reachable(redis_url, timeout_s=_REACH_TIMEOUT_S):
        raise SetupError(
            f"Redis at {without_password(redis_url)} does not answer. Start it, correct --redis-url, or leave the flag "
            "out to get a private one."
        )


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    return url if parts.password is None else url.replace(f":{parts.password}@", ":***@", 1)


def _private(binary: Path, directory: Path, log_dir: Path) -> RedisPlan:
    unix_socket = directory / "redis.sock"
    url = f"unix://{unix_socket}"

    async def answers() -> None:
        await wait_until_ready(url)

    spec = ProcessSpec(
        name="redis",
        argv=tuple(server_argv(binary, directory=directory, unix_socket=unix_socket)),
        environment=child_environment(),
        log_path=log_dir / "redis.log",
        probe=answers,
        stop_stage=REDIS_STAGE,
    )
    return RedisPlan(url=url, spec=spec)


def _runtime_dir() -> str | None:
    runtime = variable("XDG_RUNTIME_DIR")
    return runtime if runtime and Path(runtime).is_dir() else None
