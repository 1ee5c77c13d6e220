"""Carries out the plan of faults on real processes and clients."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import psutil

from pdserve.base.errors import StoreError
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.cli.chaos.client import Clients, Reader
from pdserve.cli.chaos.cluster import ChaosCluster
from pdserve.cli.chaos.faults import ROUTER, Fault, victims
from pdserve.cli.chaos.outcome import Injected
from pdserve.redis.store import Store

#: Redis loses all it had.
_EMPTIES_REDIS = ("kill-redis", "flush-redis")
#: Another fault may stop Redis meanwhile.
_FLUSH_TIMEOUT_S = 10.0


class Injector:
    """Hits the cluster and the clients while it runs.

    `injected` has each process or client that was hit, `skipped` the faults in whose place nothing could be.
    """

    def __init__(self, cluster: ChaosCluster, clients: Clients, send_burst: Callable[[], bool]) -> None:
        """`send_burst` sends requests whose prompts fill KV caches; False while earlier ones run."""
        self._cluster = cluster
        self._clients = clients
        self._send_burst = send_burst
        self._redis_lost_at = float("-inf")
        #: When each router was last killed, by index.
        self._routers_killed_at: dict[int, float] = {}
        self.injected: list[Injected] = []
        #: Faults that were carried out, and those of them that are kills.
        self.num_faults = self.num_kills = 0
        self.skipped: list[str] = []

    async def run(self, faults: Iterable[Fault]) -> None:
        """Carries out the plan until it is cancelled; what lasts is undone then."""
        started_at = time.monotonic()
        async with service_group() as lasting:
            for fault in faults:
                await asyncio.sleep(max(0.0, started_at + fault.at_s - time.monotonic()))
                if any(self._inject(each, lasting) for each in (fault, *fault.instead)):
                    self.num_faults += 1
                    self.num_kills += fault.is_kill
                else:
                    self.skipped.append(fault.kind)

    def _inject(self, fault: Fault, lasting: ServiceGroup) -> bool:
        match fault.kind:
            case "slow-reader" | "disconnect":
                return self._hit_client(fault)
            case "full-kv":
                if not self._send_burst():
                    return False
                self._note(fault, "prompts")
                return True
        names = victims(
            fault,
            self._cluster.targets(),
            since_redis_s=time.monotonic() - self._redis_lost_at,
            streams_have_routers=all(each.has_router(self._routers_killed_at) for each in self._clients.running),
        )
        for name in names:
            self._note(fault, name)
            if fault.kind in _EMPTIES_REDIS:
                self._redis_lost_at = time.monotonic()
            if fault.is_kill:
                self._kill(name)
            elif fault.kind == "flush-redis":
                lasting.start(empty_redis(self._cluster.redis_url), name=fault.kind)
            else:
                lasting.start(self._held(fault, name), name=f"{fault.kind} {name}")
        return bool(names)

    def _note(self, fault: Fault, target: str) -> None:
        self.injected.append(
            Injected(at=time.time(), kind=fault.kind, target=target, duration_s=round(fault.duration_s, 3))
        )

    def _hit_client(self, fault: Fault) -> bool:
        streams = [each for each in self._clients.running if each.outcome.sending.request.is_streamed]
        if not streams:
            return False
        reader: Reader = streams[int(fault.choice * len(streams))]
        self._note(fault, str(reader.outcome.sending.number))
        if fault.kind == "disconnect":
            reader.leave()
        else:
            reader.pause(fault.duration_s)
        return True

    def _kill(self, name: str) -> None:
        tier, _, index = name.partition("-")
        if tier == ROUTER:
            self._routers_killed_at[int(index)] = time.monotonic()
        self._cluster.note_kill(name)
        with suppress(ProcessLookupError):
            os.kill(self._cluster.pid(name), signal.SIGKILL)

    async def _held(self, fault: Fault, name: str) -> None:
        """A fault that lasts for a while. The process may end meanwhile."""
        self._cluster.hold(name, True)
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(LASTING[fault.kind](self._cluster.pid(name)))
                await asyncio.sleep(fault.duration_s)
        finally:
            self._cluster.hold(name, False)


async def empty_redis(redis_url: str) -> None:
    """A Redis that runs loses all it had, and no connection. One that is killed meanwhile has lost it, too."""
    with suppress(StoreError):
        async with Store(redis_url, timeout_s=_FLUSH_TIMEOUT_S) as store:
            await store.call("FLUSHALL", "SYNC")


@asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    """The process and its children stand still."""
    pids = _with_children(pid)
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@asynccontextmanager
async def _without_descriptors(pid: int) -> AsyncIterator[None]:
    """The process cannot open another file or connection."""
    with suppress(psutil.Error):
        async with _limited(pid, resource.RLIMIT_NOFILE, psutil.Process(pid).num_fds()):
            yield
            return
    yield


@asynccontextmanager
async def _without_disk(pid: int) -> AsyncIterator[None]:
    """Each write to a file fails, as on a full disk; so does new shared memory."""
    async with _limited(pid, resource.RLIMIT_FSIZE, 0):
        yield


@asynccontextmanager
async def _limited(pid: int, what: int, limit: int) -> AsyncIterator[None]:
    before: tuple[int, int] | None = None
    with suppress(ProcessLookupError):
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (limit, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            if before is not None:
                resource.prlimit(pid, what, before)


LASTING = {
    "stop-worker": _stopped,
    "stop-router": _stopped,
    "stop-redis": _stopped,
    "descriptors": _without_descriptors,
    "files": _without_disk,
}


def _with_children(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
