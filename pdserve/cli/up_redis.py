"""The Redis that `pdserve up` uses: the user's, or a private one that it supervises."""

from __future__ import annotations

from pathlib import Path

from pdserve.base.config import child_environment
from pdserve.base.errors import SetupError
from pdserve.cli.cluster_plan import RedisPlan
from pdserve.cli.private_redis import find_redis_server, server_argv, wait_until_ready
from pdserve.cli.services import REDIS_STAGE
from pdserve.cli.supervisor.spec import ProcessSpec
from pdserve.redis.store import Store, is_reachable

_REACH_TIMEOUT_S = 5.0


def plan_redis(redis_url: str | None, *, run_dir: Path, log_dir: Path) -> RedisPlan:
    """The user's Redis, or a private one in `run_dir`. Raises `SetupError` when there is no redis-server to start.

    The private one listens on a Unix socket that only this user can open; a TCP port would accept commands from every
    user of the machine.
    """
    if redis_url is not None:
        return RedisPlan(url=redis_url, spec=None)
    return _private(find_redis_server(), run_dir, log_dir)


async def require_reachable(redis_url: str) -> None:
    """Raises `SetupError` if the user's Redis does not answer: without it the router would never see a worker."""
    if not await is_reachable(redis_url, timeout_s=_REACH_TIMEOUT_S):
        raise SetupError(
            f"Redis at {Store(redis_url).address} does not answer. Start it, correct --redis-url, or omit the "
            "flag to get a private one."
        )


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
