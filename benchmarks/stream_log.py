"""Processor time of a router per token, with streams that can be resumed and without.

    python -m benchmarks.stream_log [--rounds 12] [--streams 32] [--tokens 120] [--step-ms 50]
        [--out benchmarks/results]

Two router processes share scripted workers, whose decode workers give each stream a token per step, and get windows of
equal requests in turn. Values are
compared within a round. The processor time of Redis is counted, too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.fake_workers import fake_worker
from tests.integration.router_svc.script import CallLog, Script
from tests.support.redis import eventually
from tests.support.tiny_model import NAME, write_model

#: `max_num_seqs` of scripted workers.
_STREAMS_PER_WORKER = 8
STATES = {"off": "0", "on": "60"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One round of one router."""

    state: str
    round: int
    router_us_per_token: float
    redis_us_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a window sends."""

    streams: int
    tokens: int
    step_s: float


def _cpu_s(pid: int) -> float:
    # The clock that clock_getcpuclockid(3) gives for a process: unlike /proc, it does not count in ticks.
    return time.clock_gettime((~pid << 3) | 2)


async def _router(stack: AsyncExitStack, model: Path, redis: PrivateRedis, resume_timeout_s: str) -> tuple[str, int]:
    """URL and process id of a router."""
    port = free_port()
    flags = {"model": model, "redis-url": redis.url, "port": port, "resume-timeout-s": resume_timeout_s}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router_svc", *words, "--local-prefill-threshold", "0", "--log-level", "warning")
    )
    stack.push_async_callback(process.wait)
    stack.callback(process.kill)
    return f"http://127.0.0.1:{port}", process.pid


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def _stream(http: aiohttp.ClientSession, url: str, tokens: int) -> None:
    body = {"model": NAME, "prompt": "Say hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200 or not (await response.read()).endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"A request to {url} failed: {await response.text()}")


async def _steps(script: Script, load: Load) -> None:
    assert script.pace is not None
    while True:
        await asyncio.sleep(load.step_s)
        for _ in range(load.streams):
            script.pace.release()


async def measure(rounds: int, load: Load) -> list[Window]:
    """All windows. The round before the first warms up."""
    windows: list[Window] = []
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(directory / NAME)
        redis = await stack.enter_async_context(PrivateRedis())
        calls = CallLog(Script(replies=[[65 + index % 20 for index in range(load.tokens)]]))
        await stack.enter_async_context(fake_worker(calls, "prefill", "prefill-0", redis.url))
        for number in range(-(-load.streams // _STREAMS_PER_WORKER)):
            await stack.enter_async_context(fake_worker(calls, "decode", f"decode-{number}", redis.url))
        routers = {state: await _router(stack, model, redis, timeout_s) for state, timeout_s in STATES.items()}
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)))
        for url, _ in routers.values():
            await eventually(lambda url=url: _is_ready(http, url))  # type: ignore[misc]
        for number in range(-1, rounds):
            for state in sorted(routers, reverse=number % 2 == 0):
                window = await _window(http, calls.script, load, routers[state], redis.pid or 0)
                if number >= 0:
                    windows.append(Window(state=state, round=number, **window))
                    print(windows[-1], flush=True)
    return windows


async def _window(
    http: aiohttp.ClientSession, script: Script, load: Load, router: tuple[str, int], redis_pid: int
) -> dict[str, float]:
    url, pid = router
    script.pace = asyncio.Semaphore(0)
    before = _cpu_s(pid), _cpu_s(redis_pid)
    steps = asyncio.create_task(_steps(script, load))
    await asyncio.gather(*(_stream(http, url, load.tokens) for _ in range(load.streams)))
    steps.cancel()
    num_tokens = load.streams * load.tokens
    return {
        "router_us_per_token": round(1e6 * (_cpu_s(pid) - before[0]) / num_tokens, 2),
        "redis_us_per_token": round(1e6 * (_cpu_s(redis_pid) - before[1]) / num_tokens, 2),
    }


def table(windows: Sequence[Window]) -> str:
    """Medians, and the difference within rounds with its 95 % interval, as Markdown."""
    lines = ["| µs per token | off | on | more | 95 % interval |", "| --- | ---: | ---: | ---: | ---: |"]
    for measure_ in ("router_us_per_token", "redis_us_per_token"):
        of = {state: [getattr(each, measure_) for each in windows if each.state == state] for state in STATES}
        more = [on - off for off, on in zip(of["off"], of["on"], strict=True)]
        resample = random.Random(0)
        medians = sorted(statistics.median(resample.choices(more, k=len(more))) for _ in range(4000))
        off, on = (statistics.median(of[state]) for state in ("off", "on"))
        name = measure_.partition("_")[0]
        lines.append(
            f"| {name} | {off:.1f} | {on:.1f} | {statistics.median(more):+.1f} | {medians[100]:+.1f} to "
            f"{medians[3900]:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="windows of each router")
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=50, help="time between two tokens of a stream")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result files")
    arguments = parser.parse_args()
    load = Load(streams=arguments.streams, tokens=arguments.tokens, step_s=arguments.step_ms / 1000)
    windows = asyncio.run(measure(arguments.rounds, load))
    text = table(windows)
    print(text)
    environment = describe()
    write_results(
        arguments.out,
        f"stream-log-{environment['date']}",
        {"environment": environment, "load": asdict(load), "windows": [asdict(each) for each in windows]},
        f"# Cost of streams that can be resumed\n\n{heading(environment, 'Medians')}{text}",
    )


if __name__ == "__main__":
    main()
