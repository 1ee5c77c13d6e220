"""Time from the end of a request to free blocks on both tiers, by phase and by what ends it.

    python -m benchmarks.cancellation [--repeats 100] [--out benchmarks/results]

An idle cluster of `pdserve up`, one worker of each tier, gets one request at a time. When it has reached a phase, it is
ended: its client disconnects, its id is cancelled, or its time is over. Time counts from that moment until every worker
reports that all its blocks are free and that nothing runs or waits there. `/metrics` of the workers is read without a
pause, so one reading, 2 to 5 ms, is part of each value. The phases:

- `encoding`: the router reads a body that is not complete.
- `prefilling`: blocks are reserved; chunks are computed and sent. It is ended at a random moment of the phase.
- `decoding`: tokens come.

For a deadline, time counts from the deadline itself, which is at a random moment, too. A request that was decoding by
then counts there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from tests.support.cluster import MODEL, Cluster, running_cluster

PHASES = ("encoding", "prefilling", "decoding")
ENDS = ("disconnect", "cancel", "deadline")
PROMPT_TOKENS, OUTPUT_TOKENS = 1536, 400
#: Small chunks, so that a phase lasts; equal work for each request.
FLAGS = (
    *("--threads-per-worker", "1", "--no-lend-cores", "--kv-cache-memory", "512MiB"),
    *("--local-prefill", "threshold", "--max-num-batched-tokens", "128"),
)
#: What a prompt takes to be computed, at least.
PREFILL_S = 0.3
#: A request reaches its phase in less; then its timeout is over.
TIMEOUT_S = {"encoding": 0.3, "prefilling": 1.2, "decoding": 4.0}
_FREE = ("pdserve_kv_blocks_free", "pdserve_kv_blocks", "pdserve_num_requests_running", "pdserve_num_requests_waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request that was ended."""

    phase: str
    end: str
    #: Whether the workers were busy when it was ended.
    was_busy: bool
    free_after_ms: float


class Observed:
    """The cluster's workers and router, read over kept connections."""

    def __init__(self, http: aiohttp.ClientSession, cluster: Cluster) -> None:
        self._http = http
        self._workers = [worker.http_address for tier in ("prefill", "decode") for worker in cluster.workers(tier)]
        self.url = cluster.base_url

    async def is_free(self) -> bool:
        """Whether no worker holds a block or a request."""
        return all(await asyncio.gather(*map(self._is_worker_free, self._workers)))

    async def _is_worker_free(self, address: str) -> bool:
        async with self._http.get(f"http://{address}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = {
            name: next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")) for name in _FREE
        }
        free, total, running, waiting = values.values()
        return free == total and not running and not waiting

    async def until_free(self) -> None:
        """Returns once everything is free."""
        while not await self.is_free():
            pass

    async def until_state(self, request_id: str, state: str) -> None:
        """Returns once the router's record has this state, or a later one."""
        while await self.state_of(request_id) not in (state, "decoding", "finished"):
            pass

    async def state_of(self, request_id: str) -> str:
        """The request's state, as the router's record has it; empty: unknown."""
        async with self._http.get(f"{self.url}/v1/requests/{request_id}/trace") as response:
            return str((await response.json())["state"]) if response.status == 200 else ""


def _body(rng: random.Random, timeout_s: float | None) -> dict[str, object]:
    prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    fields: dict[str, object] = {"temperature": 0, "ignore_eos": True, "stream": True}
    if timeout_s is not None:
        fields["timeout"] = timeout_s
    return {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, **fields}


async def _incomplete(reached: asyncio.Event) -> AsyncIterator[bytes]:
    """A body whose rest never comes."""
    yield b'{"model": "'
    reached.set()
    await asyncio.Event().wait()


async def _run(http: aiohttp.ClientSession, url: str, first_byte: asyncio.Event, **options: object) -> None:
    async with http.post(f"{url}/v1/completions", **options) as response:  # type: ignore[arg-type]
        async for _ in response.content:
            first_byte.set()


@asynccontextmanager
async def in_phase(
    http: aiohttp.ClientSession, observed: Observed, phase: str, request_id: str, timeout_s: float | None
) -> AsyncIterator[asyncio.Task[None]]:
    """A request that has reached the phase."""
    reached, first_byte = asyncio.Event(), asyncio.Event()
    headers = {"X-Request-Id": request_id}
    if phase == "encoding":
        headers |= {"Content-Type": "application/json"}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        options: dict[str, object] = {"data": _incomplete(reached), "headers": headers}
    else:
        options = {"json": _body(random.Random(request_id), timeout_s), "headers": headers}
    task = asyncio.create_task(_run(http, observed.url, first_byte, **options))
    try:
        match phase:
            case "encoding":
                await reached.wait()
                await asyncio.sleep(0.01)
            case "prefilling":
                await observed.until_state(request_id, "prefilling")
                if timeout_s is None:  # A deadline is at a random moment by itself.
                    await asyncio.sleep(random.Random(request_id).uniform(0, PREFILL_S))
            case "decoding":
                await first_byte.wait()
                await observed.until_state(request_id, "decoding")
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def measure(http: aiohttp.ClientSession, observed: Observed, phase: str, end: str, number: int) -> Sample:
    """Ends one request in its phase."""
    await observed.until_free()
    request_id = f"{phase}-{end}-{number}-{time.time_ns()}"
    timeout_s = TIMEOUT_S[phase] * random.Random(request_id).uniform(0.8, 1.2) if end == "deadline" else None
    started = time.perf_counter()
    async with in_phase(http, observed, phase, request_id, timeout_s) as task:
        was_busy = not await observed.is_free()
        if timeout_s is not None and time.perf_counter() > started + timeout_s:
            raise SystemExit(f"The request reached its phase {phase} after its timeout of {timeout_s:.2f} s.")
        if timeout_s is not None:
            await asyncio.sleep(max(started + timeout_s - time.perf_counter(), 0))
            at = started + timeout_s
        else:
            at = time.perf_counter()
            ended: dict[str, Callable[[], Awaitable[object]]] = {
                "disconnect": lambda: _disconnect(task),
                "cancel": lambda: _cancel(http, observed.url, request_id),
            }
            await ended[end]()
        await observed.until_free()
        after_s = time.perf_counter() - at
    return Sample(phase=phase, end=end, was_busy=was_busy, free_after_ms=1000 * after_s)


async def _disconnect(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


async def _cancel(http: aiohttp.ClientSession, url: str, request_id: str) -> None:
    async with http.post(f"{url}/v1/requests/{request_id}/cancel") as response:
        assert response.status == 200, await response.text()


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values is."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(samples: Sequence[Sample]) -> str:
    """A line per phase and end."""
    lines = ["| phase | ended by | requests | p50, ms | p90, ms | p99, ms | max, ms |", "| --- " * 7 + "|"]
    for phase, end in itertools.product(PHASES, ENDS):
        values = [sample.free_after_ms for sample in samples if (sample.phase, sample.end) == (phase, end)]
        if values:
            figures = (statistics.median(values), quantile(values, 0.9), quantile(values, 0.99), max(values))
            lines.append(f"| {phase} | {end} | {len(values)} | " + " | ".join(f"{each:.1f}" for each in figures) + " |")
    return "\n".join(lines) + "\n"


async def _measure_all(cluster: Cluster, repeats: int) -> list[Sample]:
    samples = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        observed = Observed(http, cluster)
        cases = [*itertools.product(range(repeats), PHASES, ENDS)]
        for number, phase, end in cases:
            samples.append(await measure(http, observed, phase, end, number))
    return samples


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    environment = describe()
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *FLAGS) as cluster:
        samples = asyncio.run(_measure_all(cluster, args.repeats))
    workload = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "flags": FLAGS, "model": MODEL}
    raw = {"environment": environment, "workload": workload, "samples": [asdict(sample) for sample in samples]}
    page = f"# Cancellation\n\n{heading(environment, 'Milliseconds until all blocks are free')}{table(samples)}"
    print(page)
    write_results(args.out, "cancellation", raw, page)


if __name__ == "__main__":
    main()
