"""The store of a URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.peers.secret import ClusterSecret
from pdserve.redis.store import Store
from router_svc.records.stream_seal import StreamSeal
from router_svc.state.directory_state import DirectoryState
from router_svc.state.redis_state import SUFFIX, RedisState
from router_svc.state.state_store import StateStore

_FILE = "file:"
#: Timeout of a call. It is longer than for the data that every request waits for: these records are larger.
_TIMEOUT_S = 2.0


@asynccontextmanager
async def opened_state(
    url: str | None,
    *,
    ttl_s: float,
    prefix: str,
    on_change: Callable[[str | None], None],
    secret: ClusterSecret | None = None,
) -> AsyncIterator[StateStore | None]:
    """The store of a URL until the block ends; None: no URL, no store.

    `prefix`: that of the cluster's keys. `on_change` gets the reason of an outage. `secret`: the cluster's, which seals
    events in Redis.

    Raises `SetupError` for a URL of another kind, and for a directory that cannot be used.
    """
    if url is None:
        yield None
    elif url.startswith(_FILE):
        path = url.removeprefix(_FILE).removeprefix("//")
        if not path:
            raise SetupError("--state-url: file: needs a directory, such as file:/var/lib/pdserve.")
        with closing(DirectoryState(Path(path), ttl_s=ttl_s)) as state:
            yield state
    elif url.startswith(("redis://", "rediss://", "unix://")):
        async with Store(url, prefix=prefix + SUFFIX, timeout_s=_TIMEOUT_S, on_change=on_change) as store:
            yield RedisState(store, ttl_s=ttl_s, seal=StreamSeal(secret))
    else:
        raise SetupError(f"--state-url: {url[:100]!r} is neither redis://, rediss:// nor file:DIR.")
