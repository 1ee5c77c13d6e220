"""Cost of keeping strangers out: TTFT, TPOT and burst throughput of `pdserve up` with everything on against all off.

    python -m benchmarks.security_cost [--rounds 20] [--requests 16] [--burst 24] [--states off on]
        [--key-setting LINE] [--out benchmarks/results]

Clusters run at the same time and get windows of equal requests in turn, in an order that changes from round to round:
256 random tokens in, 64 out, greedy. The ones that wait compute nothing. A window is a series of single requests, then
a burst of requests that arrive at once. Values are compared within a round, because a shared machine changes between
rounds. The states: `off`: an open cluster without keys. `macs`: with a cluster secret. `tls`: with mutual TLS between
the processes. `keys`: with a file of keys. `on`: all of these. `resumable`: with a secret, and streams that can be
resumed, which is no defence but costs in the same places. `--key-setting` adds a line to the table of each key, such as
a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from pdserve.cli.bench.run import run_workload
from pdserve.cli.bench.workload import BenchRequest, Target
from pdserve.cli.cluster_secrets.certificates import peer_certificates
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.secret import SECRET_VARIABLE, new_secret
from router_svc.clients.keys import digest_of
from tests.support.cluster import MODEL, Cluster, running_cluster

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
VOCABULARY = 40_000
#: Equal work in every window: no lending, no prompt that moves to the decode tier because of the load.
FLAGS = (
    *("--threads-per-worker", "1", "--no-lend-cores", "--kv-cache-memory", "512MiB"),
    *("--local-prefill", "threshold", "--dtype", "bfloat16"),
)
DEFENCES = {
    "off": (),
    "macs": ("macs",),
    "tls": ("tls",),
    "keys": ("keys",),
    "on": ("macs", "tls", "keys"),
    "resumable": ("macs", "resumable"),
}
#: What is measured, its text, and whether more is better.
MEASURES = (
    ("ttft_ms", "TTFT, ms", False),
    ("tpot_ms", "TPOT, ms", False),
    ("burst_tokens_per_s", "burst, tokens/s", True),
    ("cpu_ms", "processor time per request, ms", False),
)
#: Resamples of the rounds for an interval.
RESAMPLES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each window sends: single requests, then a burst."""

    requests: int
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Requests to one cluster in one round."""

    state: str
    round: int
    #: Medians of the single requests, at the client.
    ttft_ms: float
    tpot_ms: float
    burst_tokens_per_s: float
    #: Sum of all processes, over all requests of the window.
    cpu_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A measure of a state relative to `off`, from paired rounds: 0.01 is 1 % worse."""

    state: str
    measure: str
    median: float
    #: 95 % interval of the median.
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A cluster in one state, and how clients reach it."""

    cluster: Cluster
    target: Target


def _keys_file(directory: Path, settings: Sequence[str]) -> tuple[Path, str]:
    """A file with a hundred keys, and one of them."""
    keys = [new_secret() for _ in range(100)]
    tables = (
        [f'[[keys]]\nid = "key-{index}"\nsha256 = "{digest_of(key).hex()}"', *settings]
        for index, key in enumerate(keys)
    )
    file = directory / "keys.toml"
    file.write_text("\n".join("\n".join(lines) + "\n" for lines in tables), encoding="utf-8")
    return file, keys[0]


def _tls_variables(directory: Path) -> dict[str, str]:
    made = peer_certificates(datetime.now(UTC))
    contents = {"CERTFILE": made.certificate, "KEYFILE": made.key, "CA_CERTS": made.authority}
    variables = {"PDSERVE_PEER_SSL_SERVER_NAME": "pdserve-peer"}
    for name, content in contents.items():
        file = directory / name.lower()
        file.write_bytes(content)
        variables[f"PDSERVE_PEER_SSL_{name}"] = str(file)
    return variables


@contextmanager
def _redis() -> Iterator[str]:
    """The URL of a Redis. With one of its own, `pdserve up` would make a secret."""
    with asyncio.Runner() as runner:
        redis = PrivateRedis()
        runner.run(redis.start())
        try:
            yield redis.url
        finally:
            runner.run(redis.stop())


@contextmanager
def running(state: str, directory: Path, key_settings: Sequence[str]) -> Iterator[Running]:
    """A cluster in this state."""
    directory.mkdir()
    flags, variables, headers = [*FLAGS], dict[str, str](), dict[str, str]()
    if "macs" in DEFENCES[state]:
        variables[SECRET_VARIABLE] = new_secret()
    if "tls" in DEFENCES[state]:
        variables |= _tls_variables(directory)
    if "resumable" in DEFENCES[state]:
        variables["PDSERVE_ROUTER__RESUME_TIMEOUT_S"] = "60"
    if "keys" in DEFENCES[state]:
        file, key = _keys_file(directory, key_settings)
        flags += ["--api-keys-file", str(file)]
        headers["Authorization"] = f"Bearer {key}"
    with _redis() as redis_url, running_cluster(directory, *flags, "--redis-url", redis_url, **variables) as cluster:
        fields = {"temperature": 0, "ignore_eos": True}
        yield Running(
            cluster=cluster, target=Target(base_url=cluster.base_url, model=MODEL, fields=fields, headers=headers)
        )


def _cpu_s(cluster: Cluster) -> float:
    processes = cluster.processes()
    # The clock that clock_getcpuclockid(3) gives for a process: unlike /proc, it does not count in ticks.
    return sum(time.clock_gettime((~each.pid << 3) | 2) for name, each in processes.items() if name != "redis")


def _workload(seed: str, count: int) -> list[BenchRequest]:
    rng = random.Random(seed)
    prompts = (tuple(rng.randrange(100, VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(count))
    return [BenchRequest(prompt=prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]


def run_window(running: Running, state: str, number: int, load: Load) -> Window:
    """Sends the requests of a window. All states get the same ones in a round."""
    before = _cpu_s(running.cluster)
    workload = _workload(f"{number} single", load.requests)
    single = asyncio.run(run_workload(running.target, workload, [0.0] * load.requests, max_concurrency=1))
    burst = asyncio.run(run_workload(running.target, _workload(f"{number} burst", load.burst), [0.0] * load.burst))
    if failures := (*single.failures, *burst.failures):
        raise SystemExit(f"A request to the cluster in the state {state} failed: {failures[0]}")
    return Window(
        state=state,
        round=number,
        ttft_ms=1000 * statistics.median(record.ttft_s for record in single.records),
        tpot_ms=1000 * statistics.median(record.tpot_s for record in single.records if record.tpot_s is not None),
        burst_tokens_per_s=load.burst * OUTPUT_TOKENS / burst.duration_s,
        cpu_ms=1000 * (_cpu_s(running.cluster) - before) / (load.requests + load.burst),
    )


def compare(windows: Sequence[Window], state: str, measure: str, *, more_is_better: bool) -> Comparison:
    """How much worse a state is than `off`, from the ratios of paired windows."""
    value = {(window.state, window.round): getattr(window, measure) for window in windows}
    rounds = sorted({window.round for window in windows})
    pairs = [(value[state, number], value["off", number]) for number in rounds]
    losses = [(off / mine if more_is_better else mine / off) - 1 for mine, off in pairs]
    resample = random.Random(0)
    medians = sorted(statistics.median(resample.choices(losses, k=len(losses))) for _ in range(RESAMPLES))
    return Comparison(
        state=state,
        measure=measure,
        median=statistics.median(losses),
        low=medians[RESAMPLES * 25 // 1000],
        high=medians[RESAMPLES * 975 // 1000],
    )


def table(windows: Sequence[Window], comparisons: Sequence[Comparison]) -> str:
    """One row per state and measure, as Markdown."""
    found = {(each.state, each.measure): each for each in comparisons}
    lines = ["| state | | median | worse than off | 95 % interval |", "| --- | --- | ---: | ---: | ---: |"]
    for state in dict.fromkeys(window.state for window in windows):
        for measure, text, _ in MEASURES:
            median = statistics.median(getattr(each, measure) for each in windows if each.state == state)
            each = found.get((state, measure))
            cells = "| |" if each is None else f"| {each.median:+.2%} | {each.low:+.2%} to {each.high:+.2%} |"
            lines.append(f"| {state} | {text} | {median:.2f} {cells}")
    return "\n".join(lines) + "\n"


def measure(states: Sequence[str], rounds: int, load: Load, key_settings: Sequence[str]) -> list[Window]:
    """All windows. The round before the first warms up."""
    windows: list[Window] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = {state: stack.enter_context(running(state, directory / state, key_settings)) for state in states}
        for number in range(-1, rounds):
            first = number % len(states)
            for state in (*states[first:], *states[:first]):
                window = run_window(clusters[state], state, number, load)
                if number >= 0:
                    windows.append(window)
                    print(window, flush=True)
    return windows


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="windows of each state")
    parser.add_argument("--requests", type=int, default=16, help="single requests per window")
    parser.add_argument("--burst", type=int, default=24, help="requests that arrive at once, per window")
    parser.add_argument("--states", nargs="+", default=["off", "on"], choices=DEFENCES, help="`off` is one of them")
    parser.add_argument("--key-setting", action="append", default=[], help="line for the table of each key")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result files")
    arguments = parser.parse_args()
    if "off" not in arguments.states:
        parser.error("States are compared with `off`. Add it to --states.")
    load = Load(requests=arguments.requests, burst=arguments.burst)
    windows = measure(arguments.states, arguments.rounds, load, arguments.key_setting)
    comparisons = [
        compare(windows, state, name, more_is_better=more_is_better)
        for state in arguments.states
        if state != "off"
        for name, _, more_is_better in MEASURES
    ]
    text = table(windows, comparisons)
    print(text)
    environment = describe()
    write_results(
        arguments.out,
        f"security-cost-{environment['date']}",
        {
            "environment": environment,
            "load": asdict(load),
            "key_settings": arguments.key_setting,
            "windows": [asdict(each) for each in windows],
            "comparisons": [asdict(each) for each in comparisons],
        },
        f"# Cost of keeping strangers out\n\n{heading(environment, 'Medians')}{text}",
    )


if __name__ == "__main__":
    main()
