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

from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.cli.chaos.client import Clients, Reader
from pdserve.cli.chaos.cluster import ChaosCluster
from pdserve.cli.chaos.faults import Fault, victims
from pdserve.cli.chaos.outcome import Injected

_KILLS_OF_REDIS = "kill-redis"


class Injector:
    """Hits the cluster and the clients while it runs. `injected` has what was done, `skipped` what could not be."""

    def __init__(self, cluster: ChaosCluster, clients: Clients, send_burst: Callable[[], None]) -> None:
        """`send_burst` sends requests whose prompts fill KV caches."""
        self._cluster = cluster
        self._clients = clients
        self._send_burst = send_burst
        self._redis_lost_at = float("-inf")
        self.injected: list[Injected] = []
        self.skipped: list[str] = []

    async def run(self, faults: Iterable[Fault]) -> None:
        """Carries out the plan until it is cancelled; what lasts is undone then."""
        started_at = time.monotonic()
        async with service_group() as lasting:
            for fault in faults:
                await asyncio.sleep(max(0.0, started_at + fault.at_s - time.monotonic()))
                if not self._inject(fault, lasting):
                    self.skipped.append(fault.kind)

    def _inject(self, fault: Fault, lasting: ServiceGroup) -> bool:
        match fault.kind:
            case "slow-reader" | "disconnect":
                return self._hit_client(fault)
            case "full-kv":
                self._note(fault, "prompts")
                self._send_burst()
                return True
        names = victims(fault, self._cluster.targets(), since_redis_s=time.monotonic() - self._redis_lost_at)
        for name in names:
            self._note(fault, name)
            if fault.kind.startswith("kill-"):
                self._kill(fault, name)
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

    def _kill(self, fault: Fault, name: str) -> None:
        if fault.kind == _KILLS_OF_REDIS:
            self._redis_lost_at = time.monotonic()
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
