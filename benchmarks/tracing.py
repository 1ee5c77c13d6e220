"""Cost of traces: processor time of a cluster's processes per request, without, with and before the code for them.

    python -m benchmarks.tracing [--against DIRECTORY] [--rounds 12] [--requests 16] [--concurrency 4]
        [--out benchmarks/results]

Clusters run at the same time and get windows of equal requests in turn, in an order that changes from round to round.
Processor time per request is compared within a round, because a shared machine changes between rounds. The states:
`off`: without an endpoint. `on`: every request is traced, and a collector in the benchmark's process takes the spans.
`unsampled`: the same cluster gets requests whose caller has decided against a trace. `before`: another checkout, given
by `--against`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from decode_svc.spans import DecodeTrace
from kvtransfer.handover.reservation import Received
from kvtransfer.handover.send_path import SendStats
from kvtransfer.handover.ticket import Ticket
from pdserve.base.ids import Epoch, RequestId, TransferId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.base.trace_context import TraceContext, parse_traceparent, traceparent_of
from pdserve.net.rpc import trace_metadata
from pdserve.observe.tracing.export import BATCH
from pdserve.observe.tracing.otlp import OtlpExporter
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from prefill_svc.spans import PromptTimes, PromptTrace
from router_svc.api.request_span import request_span
from router_svc.generation import Generation, TextRules
from router_svc.records.events import Ended, WorkerChosen
from router_svc.records.record import Record
from router_svc.records.spans import RequestTrace
from tests.support.cluster import MODEL, Cluster, running_cluster
from tests.support.spans import Collector, KeepingTracer, collecting

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
VOCABULARY = 40_000
PROCESSES = ("router", "prefill-0", "decode-0")
#: Equal work in every window: no lending, no prompt that moves to the decode tier because of the load.
FLAGS = (
    *("--threads-per-worker", "1", "--no-lend-cores", "--kv-cache-memory", "512MiB"),
    *("--local-prefill", "threshold", "--dtype", "bfloat16"),
)
UNSAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
#: States that are compared, each with the one that it is relative to.
PAIRS = (("on", "unsampled"), ("on", "off"), ("unsampled", "before"), ("off", "before"))
#: Resamples of the rounds for an interval.
RESAMPLES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Requests to one cluster in one round."""

    state: str
    round: int
    #: Processor time per request, by process, in milliseconds.
    cpu_ms: dict[str, float]
    #: At the client; the machine's other load is in them.
    ttft_ms: float
    tpot_ms: float

    @property
    def total_ms(self) -> float:
        """Processor time per request of all processes, in milliseconds."""
        return sum(self.cpu_ms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each window sends."""

    requests: int
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Processor time of a state relative to another one, from paired rounds: 0.01 is 1 % more."""

    state: str
    to: str
    process: str
    median: float
    #: 95 % interval of the median.
    low: float
    high: float
    #: Median of the differences per request, in milliseconds.
    difference_ms: float


_GENERATION = Generation(
    request_id=RequestId("r"),
    worker_request_id=RequestId("r"),
    prompt=(1,),
    sampling=SamplingParams(),
    text=TextRules(),
    endpoint="/v1/completions",
)
_CALL = TraceContext("1" * 32, "2" * 16, True)
_WORKER = WorkerId("decode-0")
_SENT = SendStats(sent_blocks=16, sent_bytes=1 << 20, busy_s=0.01, first_started_at=1.0, last_done_at=1.0)
_RECEIVED = Received(
    request_id=RequestId("r"),
    transfer_id=TransferId(b"t" * 16),
    first_tokens=(1,),
    received_blocks=16,
    received_bytes=1 << 20,
    receive_s=0.01,
)
_TICKET = Ticket(
    transfer_id=TransferId(b"t" * 16),
    attempt=1,
    worker_id=_WORKER,
    epoch=Epoch(1),
    grpc_address="none:1",
    transport="ucx",
    data_address=b"",
    first_block=0,
    num_blocks=16,
    layout=KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64),
    lease_s=20.0,
    key=b"k" * 32,
    tag_base=0,
    layer_groups=1,
)


def _cpu_s(cluster: Cluster) -> dict[str, float]:
    processes = cluster.processes()
    # The clock that clock_getcpuclockid(3) gives for a process: unlike /proc, it does not count in ticks.
    return {name: time.clock_gettime((~processes[name].pid << 3) | 2) for name in PROCESSES}


def _has_code_for_traces(cluster: Cluster) -> bool:
    with urllib.request.urlopen(f"{cluster.base_url}/metrics", timeout=10) as response:
        return b"pdserve_spans_dropped" in response.read()


async def _send(cluster: Cluster, prompts: Sequence[list[int]], load: Load, headers: dict[str, str]) -> tuple[Any, Any]:
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    slots = asyncio.Semaphore(load.concurrency)
    async with cluster.async_client() as client:

        async def one(prompt: list[int]) -> None:
            async with slots:
                started_at, at = time.perf_counter(), []
                stream = await client.completions.create(
                    model=MODEL,
                    prompt=prompt,
                    max_tokens=OUTPUT_TOKENS,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                    extra_headers=headers,
                )
                at.extend([time.perf_counter() async for _ in stream])
            ttft_s.append(at[0] - started_at)
            tpot_s.append((at[-1] - at[0]) / (OUTPUT_TOKENS - 1))

        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(prompt))
    return ttft_s, tpot_s


def run_window(cluster: Cluster, state: str, number: int, load: Load) -> Window:
    """Sends the requests of a window, and waits until the cluster is idle again."""
    # Both states of one cluster get prompts of their own: none is cached.
    random_ids = random.Random(f"{number} {state == 'unsampled'}")
    prompts = [[random_ids.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(load.requests)]
    headers = {"traceparent": UNSAMPLED} if state == "unsampled" else {}
    before = _cpu_s(cluster)
    ttft_s, tpot_s = asyncio.run(_send(cluster, prompts, load, headers))
    time.sleep(1.5)  # Longer than spans are collected before they are sent, so that their window pays for them.
    after = _cpu_s(cluster)
    return Window(
        state=state,
        round=number,
        cpu_ms={name: (after[name] - before[name]) / load.requests * 1000 for name in PROCESSES},
        ttft_ms=statistics.median(ttft_s) * 1000,
        tpot_ms=statistics.median(tpot_s) * 1000,
    )


@contextmanager
def clusters(against: Path | None, collector: Collector) -> Iterator[dict[str, Cluster]]:
    """A running cluster for each state."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, *flags: str, **environment: str) -> Cluster:
            return stack.enter_context(running_cluster(directory / name, *FLAGS, *flags, **environment))

        found = {"off": start("off"), "on": start("on", "--otlp-endpoint", collector.url)}
        found["unsampled"] = found["on"]
        if against is not None:
            found["before"] = start("before", PYTHONPATH=str(against.resolve()), PYTHONSAFEPATH="1")
            assert not _has_code_for_traces(found["before"]), f"{against} has the code for traces, too"
        yield found


def compare(windows: Sequence[Window], state: str, to: str, process: str | None) -> Comparison:
    """Ratios of paired windows, of one process or of all."""
    value = {
        (window.state, window.round): window.total_ms if process is None else window.cpu_ms[process]
        for window in windows
    }
    rounds = sorted({window.round for window in windows})
    ratios = [value[state, number] / value[to, number] - 1 for number in rounds]
    resample = random.Random(0)
    medians = sorted(statistics.median(resample.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Comparison(
        state=state,
        to=to,
        process=process or "all",
        median=statistics.median(ratios),
        low=medians[RESAMPLES * 25 // 1000],
        high=medians[RESAMPLES * 975 // 1000],
        difference_ms=statistics.median(value[state, number] - value[to, number] for number in rounds),
    )


def table(windows: Sequence[Window], comparisons: Sequence[Comparison]) -> str:
    """Both tables as Markdown."""
    states = list(dict.fromkeys(window.state for window in windows))
    lines = ["| state | router | prefill | decode | all |", "| --- | ---: | ---: | ---: | ---: |"]
    for state in sorted(states):
        mine = [window for window in windows if window.state == state]
        cells = [statistics.median(window.cpu_ms[name] for window in mine) for name in PROCESSES]
        cells.append(statistics.median(window.total_ms for window in mine))
        lines.append(f"| {state} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    lines += ["", "| state | compared with | process | median | 95 % interval | difference |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: |")
    lines += [
        f"| {each.state} | {each.to} | {each.process} | {each.median:+.2%} | {each.low:+.2%} to {each.high:+.2%} "
        f"| {each.difference_ms:+.2f} ms |"
        for each in comparisons
    ]
    return "\n".join(lines) + "\n"


def _ended_record() -> Record:
    record = Record.new(_GENERATION, accepted_at=0.0, clock=time.monotonic)
    for tier in ("decode", "prefill"):
        record.append(WorkerChosen(worker=_WORKER, epoch=Epoch(1), tier=tier, why="why"), at=0.0, call=_CALL)
    record.append(Ended.finished(["length"]), at=0.0)
    return record


def trace_one(tracer: Tracer, record: Record) -> None:
    """Everything that the three processes do for the trace of one request, without sending."""
    # Router: the middleware's span, the prompt's, both calls.
    with request_span(tracer, "POST /v1/completions", parse_traceparent(None)) as span:
        trace = RequestTrace(tracer=tracer, parent=span.context)
        to_decode, to_prefill = traceparent_of(trace.start_call()), trace_metadata(trace.start_call())
        trace.end(record)
    # Prefill worker.
    prompt = PromptTrace.start(tracer, parse_traceparent(to_prefill[0][1] if to_prefill else None))
    times = PromptTimes(accepted=1.0, started=1.0, computed=1.0, committed=1.0)
    times.add_chunk(1.0, PROMPT_TOKENS)
    prompt.end(times, {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, ticket=_TICKET, sent=_SENT, error=None)
    # Decode worker, with a check for each message of tokens.
    decode = DecodeTrace(opened_at=0.0)
    decode.join(tracer, parse_traceparent(to_decode))
    replace(_TICKET, trace=decode.granted(0.0))
    decode.reception_ended(0.0, _RECEIVED)
    for _ in range(OUTPUT_TOKENS):
        if decode.first_tokens_at is None:
            decode.first_tokens_at = 0.0
    decode.end({"a": 1, "b": 2, "c": 3, "d": 4}, None)


async def cost_us(url: str) -> dict[str, float]:
    """Microseconds per request, over all three processes, of what the code for traces does.

    `off`: without an endpoint. `making`: spans of a sampled request. `sending`: their export, in the thread's own time.
    """

    record = _ended_record()

    def per_request(tracer: Tracer) -> float:
        return min(timeit.repeat(lambda: trace_one(tracer, record), number=1000, repeat=5)) / 1000 * 1e6

    tracer = KeepingTracer()
    off, making = per_request(NO_TRACER), per_request(tracer)
    exporter = OtlpExporter(f"{url}/v1/traces", service_name="pdserve", instance="benchmark")
    tracer.spans.clear()
    for _ in range(BATCH):
        trace_one(tracer, record)
    per_trace, sending = len(tracer.spans) // BATCH, []
    for _ in range(5):
        started_at = time.thread_time()
        for first in range(0, len(tracer.spans), BATCH):
            assert exporter.export(tracer.spans[first : first + BATCH]) is None
        sending.append((time.thread_time() - started_at) / BATCH * 1e6)
    exporter.close()
    return {"off": off, "making": making, "sending": min(sending), "spans": per_trace}


def page_of(raw: dict[str, Any]) -> str:
    """The results for readers."""
    windows = [Window(**window) for window in raw["windows"]]
    states = {window.state for window in windows}
    pairs = [pair for pair in PAIRS if states.issuperset(pair)]
    comparisons = [compare(windows, *pair, process) for pair in pairs for process in (None, *PROCESSES)]
    load, about = raw["load"], raw["environment"]
    whole_ms = statistics.median(window.total_ms for window in windows if window.state == "off")
    own = {
        "without an endpoint": raw["own_us"]["off"],
        "making the spans": raw["own_us"]["making"],
        f"sending them, {raw['own_us']['spans']:.0f} per request": raw["own_us"]["sending"],
    }
    rounds = len({window.round for window in windows})
    return (
        "# Cost of traces\n\n"
        + heading(about, "Processor time per request in milliseconds")
        + f"{MODEL}, bfloat16, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, streamed. One prefill and one decode\n"
        f"worker with one thread each; {rounds} rounds of {load['requests']} requests per state, {load['concurrency']} "
        f"at once.\n{raw['spans']} spans arrived at the collector, {sum(raw['dropped'].values()):.0f} were dropped.\n\n"
        f"{table(windows, comparisons)}\n"
        "`on` and `unsampled` are the same processes. The others are processes of their own, which differ by some\n"
        "percent whatever code they run; compare `unsampled` with `before`. What the code does without an endpoint is\n"
        "measured by itself for that reason. Processor time per request over all three processes, in microseconds:\n\n"
        "| | | share of `off` |\n| --- | ---: | ---: |\n"
        + "".join(f"| {name} | {spent:.0f} | {spent / whole_ms / 1000:.3%} |\n" for name, spent in own.items())
    )


def measure(load: Load, rounds: int, against: Path | None) -> dict[str, Any]:
    """Runs the clusters. Returns the raw results."""
    windows = []
    with collecting() as collector, clusters(against, collector) as found:
        for number in range(-1, rounds):  # The first round warms up.
            states = list(found)
            random.Random(number).shuffle(states)
            for state in states:
                window = run_window(found[state], state, number, load)
                print(number, state, {name: round(spent, 2) for name, spent in window.cpu_ms.items()}, flush=True)
                windows.append(window)
        spans = len(collector.spans())
        own_us = asyncio.run(cost_us(collector.url))
        dropped = {
            name: found["on"].metric(address, "pdserve_spans_dropped_total")
            for name, address in _addresses(found["on"]).items()
        }
    return {
        "environment": describe(),
        "load": asdict(load),
        "spans": spans,
        "dropped": dropped,
        "own_us": own_us,
        "windows": [asdict(window) for window in windows if window.round >= 0],
    }


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="checkout without the code for traces, with its kernels built")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    load = Load(requests=arguments.requests, concurrency=arguments.concurrency)
    raw = measure(load, arguments.rounds, arguments.against)
    page = page_of(raw)
    write_results(arguments.out, f"tracing-{raw['environment']['date']}", raw, page)
    print(page)


def _addresses(cluster: Cluster) -> dict[str, str]:
    workers = {worker.worker_id: worker.http_address for worker in cluster.view().workers}
    return {"router": f"127.0.0.1:{cluster.port}", **workers}


if __name__ == "__main__":
    main()
