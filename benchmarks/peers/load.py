"""The workloads: each runs on one ready server and returns samples by measure.

The client is that of `pdserve bench serve`, the same for all systems: one process on the servers' cores. It sends token
ids, greedy, and ignores the end of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.environments import PeerUnavailable
from benchmarks.peers.rows import ARRIVALS, BURST, DECODE, PREFILL, PREFIX
from pdserve.cli.bench.arrivals import steady
from pdserve.cli.bench.client import open_session, send
from pdserve.cli.bench.datasets import RandomLengths, TokenPool, random_requests
from pdserve.cli.bench.metrics import percentile
from pdserve.cli.bench.run import run_workload
from pdserve.cli.bench.workload import BenchRequest, RequestRecord, Target

#: Ordinary tokens; lower ids are special tokens.
_POOL = TokenPool(range(100, 40_000))

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Size of each workload in a round."""

    #: Requests of workloads that send one at a time, after one that is not counted.
    repeats: int
    num_streams: int = 16
    prompt_tokens: int = 256
    output_tokens: int = 64
    long_prompt_tokens: int = 1536
    prefill_tokens: int = 1024
    prefix_tokens: int = 960
    #: Number of streams that run while long prompts arrive, and their length.
    num_running: int = 8
    running_output_tokens: int = 512
    num_arriving: int = 6
    first_arrival_s: float = 1.0
    arrivals_per_s: float = 0.5


FULL = Sizes(repeats=3)
QUICK = Sizes(repeats=1, running_output_tokens=256, num_arriving=3)


async def decode_alone(target: Target, sizes: Sizes, seed: int) -> Samples:
    """Runs one stream at a time: TPOT."""
    requests = _random(sizes.repeats + 1, sizes.prompt_tokens, sizes.output_tokens, f"decode:{seed}")
    records = await _one_by_one(target, requests)
    return {"tpot_ms": [1000 * _known(record.tpot_s) for record in records[1:]]}


async def prefill_alone(target: Target, sizes: Sizes, seed: int) -> Samples:
    """Sends one new prompt at a time, for one token of output: TTFT."""
    records = await _one_by_one(target, _random(sizes.repeats + 1, sizes.prefill_tokens, 1, f"prefill:{seed}"))
    return {"prefill_ttft_ms": [1000 * record.ttft_s for record in records[1:]]}


async def shared_prefix(target: Target, sizes: Sizes, seed: int) -> Samples:
    """Sends pairs of prompts with a common prefix, one after the other: TTFT of the second."""
    tail_tokens = sizes.prefill_tokens - sizes.prefix_tokens
    ttfts = []
    for number in range(sizes.repeats + 1):
        pair = random_requests(
            _POOL,
            2,
            RandomLengths(input_len=tail_tokens, output_len=1, prefix_len=sizes.prefix_tokens),
            seed=f"prefix:{seed}:{number}",
        )
        records = await _one_by_one(target, pair)
        ttfts.append(1000 * records[1].ttft_s)
    return {"prefix_ttft_ms": ttfts[1:]}


async def burst(target: Target, sizes: Sizes, seed: int) -> Samples:
    """Sends many prompts at once: output tokens per second until all are complete, and the longest gap in a stream."""
    requests = _random(sizes.num_streams, sizes.prompt_tokens, sizes.output_tokens, f"burst:{seed}")
    result = await run_workload(target, requests, steady(len(requests), float("inf")))
    records = [_completed(record) for record in result.records]
    return {
        "burst_tokens_per_s": [sum(record.output_tokens for record in records) / result.duration_s],
        "burst_longest_gap_ms": [1000 * max(gap for record in records for gap in record.itls_s)],
        "burst_tpot_ms": [1000 * percentile(sorted(_known(record.tpot_s) for record in records), 50)],
        "burst_ttft_ms": [1000 * percentile(sorted(record.ttft_s for record in records), 50)],
    }


async def arrivals(target: Target, sizes: Sizes, seed: int) -> Samples:
    """Sends long prompts while other streams run: p99 ITL over all of them.

    Streams that end are replaced until the last long prompt has been answered, so that a fast server has as many
    concurrent streams as a slow one.
    """
    long_prompts = _random(sizes.num_arriving, sizes.long_prompt_tokens, sizes.output_tokens, f"arriving:{seed}")
    gaps_s = steady(len(long_prompts), sizes.arrivals_per_s, seed=seed)
    is_over = asyncio.Event()

    async def keep_running(number: int) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        async with open_session(target) as session:
            while not is_over.is_set():
                name = f"running:{seed}:{number}:{len(records)}"
                [request] = _random(1, sizes.prompt_tokens, sizes.running_output_tokens, name)
                records.append(_completed(await send(session, target, request, run_started_at=0.0)))
        return records

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(keep_running(number)) for number in range(sizes.num_running)]
        result = await run_workload(target, long_prompts, [sizes.first_arrival_s + gap for gap in gaps_s])
        is_over.set()
    arrived = [_completed(record) for record in result.records]
    records = arrived + [record for task in running for record in task.result()]
    gaps = sorted(1000 * gap for record in records for gap in record.itls_s)
    return {
        "arrivals_p99_itl_ms": [percentile(gaps, 99)],
        "arrivals_median_itl_ms": [percentile(gaps, 50)],
        "arrivals_ttft_ms": [1000 * percentile(sorted(record.ttft_s for record in arrived), 50)],
    }


Workload = Callable[[Target, Sizes, int], Coroutine[Any, Any, Samples]]
WORKLOADS: Mapping[str, Workload] = {
    DECODE: decode_alone,
    PREFILL: prefill_alone,
    PREFIX: shared_prefix,
    BURST: burst,
    ARRIVALS: arrivals,
}


def _random(count: int, input_len: int, output_len: int, seed: str) -> list[BenchRequest]:
    return random_requests(_POOL, count, RandomLengths(input_len=input_len, output_len=output_len), seed=seed)


async def _one_by_one(target: Target, requests: Sequence[BenchRequest]) -> list[RequestRecord]:
    result = await run_workload(target, requests, [0.0] * len(requests), max_concurrency=1)
    return [_completed(record) for record in result.records]


def _completed(record: RequestRecord) -> RequestRecord:
    """The record itself. Raises `PeerUnavailable` for a failed request: its server then has no figure."""
    if record.failure is not None:
        raise PeerUnavailable(f"a request failed: {record.failure.reason}: {record.failure.message[:200]}")
    return record


def _known(value: float | None) -> float:
    if value is None:
        raise PeerUnavailable("a completion ended after one token, although it should have continued")
    return value
