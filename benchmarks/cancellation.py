"""Time from the end of a request to free blocks on both tiers, by phase and by what ends it.

    python -m benchmarks.cancellation [--repeats 100] [--phases queued,reserved] [--seed 0] [--out benchmarks/results]

An idle cluster of `pdserve up`, one worker of each tier, gets one request at a time. When it has reached a phase, it is
ended: its client disconnects, its id is cancelled, or its time is over. Time counts from that moment until every worker
reports that all its blocks are free and that nothing runs or waits there. `/metrics` of the workers is read without a
pause, so one reading, 2 to 5 ms, is part of each value. The phases:

- `encoding`: the router reads a body that is not complete.
- `queued`: the request waits for its turn at the router, since another one has all sequences.
- `reserving`: it waits at the decode worker, since another one has its share of the blocks.
- `reserved`: its blocks are reserved, and its prompt waits at the prefill worker behind that of another one.
- `prefilling`: blocks are reserved; chunks are computed and sent. It is ended at a random moment of the phase.
- `decoding`: tokens come.

In the phases in which another request runs, time counts until what is reported is as it was before: requests that run
or wait at the router and the decode worker, and blocks that are reserved. That all blocks are free is seen once the
other request has ended, too.

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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from benchmarks.environment import describe, heading
from benchmarks.observed_cluster import Gauges, Observed, PhaseMissed
from benchmarks.result_files import write_results
from tests.support.cluster import MODEL, Cluster, running_cluster

PHASES = ("encoding", "queued", "reserving", "reserved", "prefilling", "decoding")
ENDS = ("disconnect", "cancel", "deadline")
PROMPT_TOKENS, OUTPUT_TOKENS = 1536, 400
MAX_NUM_SEQS = 4
#: KV blocks are for about 11,000 tokens, half of which transfers may reserve: the other request takes 4,500 of these.
OCCUPANT_TOKENS = 4500
RESERVED_TOKENS = 768
#: Small chunks, so that a phase lasts; equal work for each request.
FLAGS = (
    *("--threads-per-worker", "1", "--no-lend-cores", "--kv-cache-memory", "256MiB"),
    *("--local-prefill", "threshold", "--max-num-batched-tokens", "128"),
    *("--max-num-seqs", str(MAX_NUM_SEQS)),
)
#: What a prompt takes to be computed, at least.
PREFILL_S = 0.3
#: A request reaches its phase in less; then its timeout is over. One that does not is tried again with a longer one.
TIMEOUT_S = {
    **{"encoding": 0.3, "queued": 0.5, "reserving": 0.5, "reserved": 0.5},
    **{"prefilling": 1.2, "decoding": 6.0},
}
#: Whether a request has reached its phase, by what is reported now and what was before it.
BEHIND_ANOTHER: dict[str, Callable[[Gauges, Gauges], bool]] = {
    "queued": lambda now, before: now.router_waiting > before.router_waiting,
    "reserving": lambda now, before: now.decode_waiting > before.decode_waiting,
    "reserved": lambda now, before: now.decode_reserved > before.decode_reserved,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request that was ended."""

    phase: str
    end: str
    #: Whether the workers were busy when it was ended.
    was_busy: bool
    free_after_ms: float


def _body(
    rng: random.Random, timeout_s: float | None, num_tokens: int = PROMPT_TOKENS, n: int = 1
) -> dict[str, object]:
    prompt = [rng.randrange(100, 40_000) for _ in range(num_tokens)]
    fields: dict[str, object] = {"temperature": 0, "ignore_eos": True, "stream": True}
    if timeout_s is not None:
        fields["timeout"] = timeout_s
    return {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "n": n, **fields}


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
async def occupied(
    http: aiohttp.ClientSession, observed: Observed, phase: str, request_id: str
) -> AsyncIterator[Gauges | None]:
    """What is reported while another request is computed behind which the phase lasts; None: it needs none."""
    if phase not in BEHIND_ANOTHER:
        yield None
        return
    choices = MAX_NUM_SEQS if phase == "queued" else 1
    body = _body(random.Random(f"{request_id}/other"), None, OCCUPANT_TOKENS, choices)
    headers = {"X-Request-Id": f"{request_id}-other"}
    task = asyncio.create_task(_run(http, observed.url, asyncio.Event(), json=body, headers=headers))
    try:
        await observed.until_state(f"{request_id}-other", "prefilling")
        assert await observed.comes_to(lambda now: now.decode_reserved > 0)
        yield await observed.gauges()
    finally:
        await _disconnect(task)


@asynccontextmanager
async def in_phase(
    http: aiohttp.ClientSession, observed: Observed, phase: str, request_id: str, timeout_s: float | None
) -> AsyncIterator[asyncio.Task[None]]:
    """A request that has reached the phase, but for one behind another request, which has only been sent."""
    reached, first_byte = asyncio.Event(), asyncio.Event()
    headers = {"X-Request-Id": request_id}
    if phase == "encoding":
        headers |= {"Content-Type": "application/json"}
        if timeout_s is not None:
            headers["X-Request-Timeout"] = str(timeout_s)
        options: dict[str, object] = {"data": _incomplete(reached), "headers": headers}
    else:
        num_tokens = RESERVED_TOKENS if phase == "reserved" else PROMPT_TOKENS
        options = {"json": _body(random.Random(request_id), timeout_s, num_tokens), "headers": headers}
    task = asyncio.create_task(_run(http, observed.url, first_byte, **options))
    try:
        match phase:
            case "encoding":
                await reached.wait()
                await asyncio.sleep(0.01)
            case "reserved":
                await observed.until_state(request_id, "prefilling")
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


async def measure(http: aiohttp.ClientSession, observed: Observed, phase: str, end: str, request_id: str) -> Sample:
    """Ends one request in its phase. Raises `PhaseMissed` for one that has ended before."""
    await observed.until_free()
    timeout_s = TIMEOUT_S[phase] * random.Random(request_id).uniform(0.8, 1.2) if end == "deadline" else None
    async with occupied(http, observed, phase, request_id) as before:
        started = time.perf_counter()
        async with in_phase(http, observed, phase, request_id, timeout_s) as task:
            was_busy = not await observed.is_free()
            if before is not None and not await observed.comes_to(lambda now: BEHIND_ANOTHER[phase](now, before)):
                raise PhaseMissed(f"Request {request_id} did not reach its phase.")
            if timeout_s is not None and time.perf_counter() > started + timeout_s:
                raise PhaseMissed(f"Request {request_id} reached its phase after its timeout of {timeout_s:.2f} s.")
            if timeout_s is not None:
                await asyncio.sleep(max(started + timeout_s - time.perf_counter(), 0))
                at = started + timeout_s
            else:
                at = time.perf_counter()
                await (_disconnect(task) if end == "disconnect" else _cancel(http, observed.url, request_id))
            is_over = await (observed.comes_to(lambda now: now == before) if before else observed.until_free())
            after_s = time.perf_counter() - at
            if before is not None and await observed.state_of(f"{request_id}-other") != "prefilling":
                raise PhaseMissed(f"The other request was computed before {request_id} had ended.")
            assert is_over, f"request {request_id} has left something behind"
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


async def _measure_all(cluster: Cluster, repeats: int, phases: Sequence[str], seed: int) -> list[Sample]:
    samples = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        observed = Observed(http, cluster)
        for number, phase, end in itertools.product(range(repeats), phases, ENDS):
            for attempt in itertools.count():
                try:
                    name = f"{phase}-{end}-{number}-{attempt}-{seed}"
                    samples.append(await measure(http, observed, phase, end, name))
                    break
                except PhaseMissed as missed:
                    print(missed)
                    TIMEOUT_S[phase] *= 1.2
        await observed.until_free()
    return samples


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--phases", default=",".join(PHASES), help="separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    phases = [phase for phase in PHASES if phase in args.phases.split(",")]
    environment = describe()
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *FLAGS) as cluster:
        samples = asyncio.run(_measure_all(cluster, args.repeats, phases, args.seed))
    workload = {
        **{"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "other_tokens": OCCUPANT_TOKENS},
        **{"reserved_tokens": RESERVED_TOKENS, "flags": FLAGS, "model": MODEL, "seed": args.seed},
    }
    raw = {"environment": environment, "workload": workload, "samples": [asdict(sample) for sample in samples]}
    name = f"cancellation-{environment['date']}"
    page = f"# Cancellation\n\n{heading(environment, 'Milliseconds until all blocks are free')}{table(samples)}"
    print(page)
    write_results(args.out, name, raw, page)


if __name__ == "__main__":
    main()
