"""Lag of a router's event loop, and gaps in streams, while one client sends the worst bodies that are taken.

    python -m benchmarks.loop_lag MODEL [--url http://127.0.0.1:8000] [--streams 8] [--seconds 10]
        [--out benchmarks/results]

Runs against a running cluster. For each kind of body, `--streams` completions are streamed while the body is posted
again and again for `--seconds`. Reported are the gaps between two events of a stream, by the clock, and the answers.
`none` is the same without such a client. Lag is what the router measured in the meantime.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from benchmarks import environment
from benchmarks.result_files import write_results

MAX_BODY = 8 * 1024**2
_LAG = "pdserve_event_loop_lag_seconds_bucket"
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one kind of body did."""

    kind: str
    posts: int
    statuses: list[int]
    median_gap_ms: float
    p99_gap_ms: float
    longest_gap_ms: float
    #: Timers of the router's event loop, and those of them that were more than 20 ms late.
    timers: int
    late_timers: int
    #: Processor time of the router per second, which other processes of the machine do not lengthen.
    router_cpu_share: float


def bodies(model: str) -> dict[str, tuple[str, bytes] | None]:
    """Path and body of each kind."""
    chat = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    head = json.dumps({"model": model, "prompt": 0})[:-2].encode()
    return {
        "none": None,
        "text": ("/v1/completions", head + b'"' + b"a b " * (MAX_BODY // 4 - 100) + b'"}'),
        "token ids": ("/v1/completions", head + b"[" + b"1," * 1_100_000 + b"1]}"),
        "lists": ("/v1/completions", head + b"[" + b"[]," * 2_700_000 + b"1]}"),
        "keys": (
            "/v1/chat/completions",
            json.dumps(chat | {"stream_options": {f"key{index}": 1 for index in range(290)}}).encode(),
        ),
        "messages": ("/v1/chat/completions", json.dumps(chat | {"messages": chat["messages"] * 4096}).encode()),
        "tokenize": ("/tokenize", b'{"return_token_strs": true, "prompt": "' + b"a b " * 24_990 + b'"}'),
        "log-probabilities": (
            "/v1/completions",
            json.dumps({"model": model, "prompt": "x", "n": 16, "max_tokens": 128, "logprobs": 20}).encode(),
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What the router has counted so far."""

    at: float
    timers: int
    timers_in_time: int
    cpu_s: float


async def _totals(http: aiohttp.ClientSession, url: str) -> _Totals:
    async with http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    buckets = {line.partition('le="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines if _LAG in line}
    [cpu_s] = [float(line.split()[-1]) for line in lines if line.startswith("process_cpu_seconds_total")]
    return _Totals(at=time.monotonic(), timers=int(buckets["+Inf"]), timers_in_time=int(buckets["0.02"]), cpu_s=cpu_s)


async def _stream(http: aiohttp.ClientSession, url: str, model: str, until: float, gaps: list[float]) -> None:
    body = {"model": model, "prompt": "Count:", "max_tokens": 256, "ignore_eos": True, "stream": True, "seed": _SEED}
    while time.monotonic() < until:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            last: float | None = None
            async for _ in response.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def _measure(url: str, model: str, kind: str, args: argparse.Namespace) -> Result:
    worst, gaps, statuses, posts = bodies(model)[kind], [0.0], set[int](), 0
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        before = await _totals(http, url)
        until = time.monotonic() + args.seconds
        streams = [group.create_task(_stream(http, url, model, until, gaps)) for _ in range(args.streams)]
        while worst is not None and time.monotonic() < until:
            path, data = worst
            headers = {"Content-Type": "application/json"}
            async with http.post(url + path, data=data, headers=headers) as response:
                await response.read()
                statuses.add(response.status)
                posts += 1
        await asyncio.wait(streams)
        after = await _totals(http, url)
    gaps.sort()
    return Result(
        kind=kind,
        posts=posts,
        statuses=sorted(statuses),
        median_gap_ms=gaps[len(gaps) // 2] * 1e3,
        p99_gap_ms=gaps[int(len(gaps) * 0.99)] * 1e3,
        longest_gap_ms=gaps[-1] * 1e3,
        timers=after.timers - before.timers,
        late_timers=after.timers - before.timers - (after.timers_in_time - before.timers_in_time),
        router_cpu_share=(after.cpu_s - before.cpu_s) / (after.at - before.at),
    )


def _page(about: dict[str, object], workload: dict[str, object], results: list[Result]) -> str:
    rows = "\n".join(
        f"| {each.kind} | {each.posts} | {', '.join(map(str, each.statuses))} | {each.median_gap_ms:.1f} "
        f"| {each.p99_gap_ms:.1f} | {each.longest_gap_ms:.1f} | {each.late_timers} of {each.timers} "
        f"| {each.router_cpu_share:.2f} |"
        for each in results
    )
    head = environment.heading(about, "ms").rstrip() + "\n\n"
    columns = (
        "| body | posts | status | median gap | p99 gap | longest gap | timers later than 20 ms | router's cores |"
    )
    note = f"{workload['streams']} streams of {workload['model']}, {workload['seconds']:g} s for each body."
    return f"# Lag of the router's event loop\n\n{head}{note}\n\n{columns}\n|{' --- |' * 8}\n{rows}\n"


async def _main(args: argparse.Namespace) -> None:
    results = [await _measure(args.url, args.model, kind, args) for kind in bodies(args.model)]
    about = environment.describe()
    workload = {"model": args.model, "streams": args.streams, "seconds": args.seconds, "seed": _SEED}
    page = _page(about, workload, results)
    print(page)
    if args.out is not None:
        raw = {"environment": about, "workload": workload, "results": [asdict(each) for each in results]}
        write_results(args.out, f"loop-lag-{about['date']}", raw, page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lag of a router's event loop under the worst bodies.")
    parser.add_argument("model")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    asyncio.run(_main(parser.parse_args()))
