"""What must be as before once all requests have ended: blocks, leases, descriptors, threads, processes, Redis."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.chaos.cluster import ChaosCluster
from pdserve.cli.status import ClusterStatus
from pdserve.redis.store import Store, as_bytes, as_list

_POLL_INTERVAL_S = 0.2
#: Connections that a process may keep open for later requests: to clients, other processes and Redis.
FD_SLACK = 24
#: Threads of pools that grow to a fixed size as they are used.
THREAD_SLACK = 24
#: Gauges of a worker that are 0 when nothing runs.
_ZERO = (
    "pdserve_kv_transfers_active",
    "pdserve_kv_blocks_held",
    "pdserve_kv_blocks_reserved",
    "pdserve_num_requests_running",
    "pdserve_num_requests_waiting",
)
#: Keys that live as long as the cluster: the workers, the prefix index and its stream of changes, the ids of requests.
#: All others must expire.
LASTING_KEYS = frozenset({"workers", "workers-mark", "kv-workers", "kv-head", "kv-events", "reqs"})
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """System resources of a process."""

    fds: int
    threads: int
    children: int


async def settled(http: aiohttp.ClientSession, cluster: ChaosCluster, timeout_s: float) -> list[str]:
    """Waits until all processes are ready and nothing runs. Returns what is still held when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = await _held(http, cluster)
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _held(http: aiohttp.ClientSession, cluster: ChaosCluster) -> list[str]:
    """What is not as it is in an idle cluster."""
    if waiting := cluster.waited_for():
        return [f"{name} is not ready" for name in waiting]
    found: list[str] = []
    num_workers = sum(each.tier in ("prefill", "decode") for each in cluster.targets())
    addresses: dict[str, str] = {}
    for url in cluster.urls:
        try:
            async with http.get(f"{url}/v1/cluster") as response:
                view = ClusterStatus.model_validate_json(await response.read())
        except (aiohttp.ClientError, ValueError) as error:
            return [f"{url} does not answer: {error}"]
        if view.router.running or view.router.queued:
            found.append(f"{url} has {view.router.running} running and {view.router.queued} queued requests")
        if sum(worker.ready for worker in view.workers) != num_workers or view.router.degraded:
            found.append(f"{url} knows of {len(view.workers)} workers and is degraded: {view.router.degraded}")
        addresses |= {worker.worker_id: worker.http_address for worker in view.workers}
    for name, address in addresses.items():
        found += await _held_by_worker(http, name, address)
    return found


async def _held_by_worker(http: aiohttp.ClientSession, name: str, address: str) -> list[str]:
    try:
        async with http.get(f"http://{address}/metrics") as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        return [f"{name} does not answer: {error}"]
    return [f"{name}: {what}" for what in held_blocks(text)]


def held_blocks(metrics: str) -> list[str]:
    """What a worker's metrics say it still holds."""
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    values = {sample.name: sample.value for sample in samples if sample.name in (*_ZERO, *_BLOCKS)}
    found = [f"{each} is {_shown(values.get(each))}" for each in _ZERO if values.get(each) != 0]
    free, total = (values.get(each) for each in _BLOCKS)
    return [*found, *([] if free == total and total else [f"{_shown(free)} of {_shown(total)} blocks are free"])]


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


_BLOCKS = ("pdserve_kv_blocks_free", "pdserve_kv_blocks")


def footprints(cluster: ChaosCluster) -> dict[str, Footprint]:
    """Resources of each process, by name."""
    found = {}
    for target in cluster.targets():
        process = psutil.Process(cluster.pid(target.name))
        found[target.name] = Footprint(
            fds=process.num_fds(), threads=process.num_threads(), children=len(process.children(recursive=True))
        )
    return found


def grown(before: Mapping[str, Footprint], now: Mapping[str, Footprint]) -> list[str]:
    """Processes that have more than before, beyond what pools and connections explain."""
    return [
        f"{name} had {before[name]} and has {found}"
        for name, found in now.items()
        if found.fds > before[name].fds + FD_SLACK
        or found.threads > before[name].threads + THREAD_SLACK
        or found.children > before[name].children
    ]


async def lasting_keys(redis_url: str) -> list[str]:
    """Keys in Redis that do not expire and are not those of a running cluster."""
    found = []
    async with Store(redis_url, timeout_s=5.0) as store:
        for reply in as_list(await store.call("KEYS", store.key("*"))):
            key = as_bytes(reply)
            ttl = await store.call("PTTL", key)
            name = key.decode(errors="replace").removeprefix(store.key(""))
            if ttl == -1 and name not in LASTING_KEYS:
                found.append(f"Redis: {name} does not expire")
    return found


def shared_memory() -> set[str]:
    """Names of the segments in shared memory, POSIX and System V."""
    names = {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()
    return names | {f"sysv:{key}" for key in _system_v()}


def left_segments(before: Iterable[str], pids: Iterable[int]) -> list[str]:
    """Segments that were not there before and that no process maps; of System V, those of `pids` alone."""
    new = shared_memory() - set(before)
    creators = {f"sysv:{key}": pid for key, pid in _system_v().items()}
    ours = {name for name in new if not name.startswith("sysv:") and _is_ours(name)} - _mapped()
    ours |= {name for name in new if creators.get(name) in set(pids)}
    return sorted(f"shared memory {name} is left" for name in ours)


def _system_v() -> dict[str, int]:
    """The process that created each segment, by the segment's id."""
    try:
        lines = Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    return {words[1]: int(words[4]) for words in map(str.split, lines)}


def _is_ours(name: str) -> bool:
    try:
        return (_SHARED_MEMORY / name).stat().st_uid == os.getuid()
    except OSError:
        return False


def _mapped() -> set[str]:
    """Names of the segments that a process maps or has open."""
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            links = [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {match[1] for match in re.finditer(r"/dev/shm/([^/\s]+)", "\n".join([maps, *links]))}
    return found


def left_processes() -> list[str]:
    """Children of this process, which has stopped the cluster."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found.append(f"process {child.pid} is left: {' '.join(child.cmdline()[:4])}")
        except psutil.Error:
            continue
    return found
