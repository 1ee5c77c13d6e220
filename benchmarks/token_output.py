"""From the step thread to the router: cost of publishing tokens on a decode worker, and its effect on the steps.

    python -m benchmarks.token_output [--against DIRECTORY] [--repeats 3] [--steps 300] [--out benchmarks/results]

Runs a complete decode worker, with gRPC and metrics. Its model is a stand-in that takes `FORWARD_S` without the
interpreter's lock, as kernels do. Another process holds one stream per sequence. With `--against`, another checkout of
the repository is measured alternately with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.result_files import write_results
from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeService
from kernels.decoder import LayerListener
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.ids import WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.base.tasks import service_group
from pdserve.base.wire import sampling_to_wire
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.batch import Batch
from pdserve.net.rpc import serve_grpc
from pdserve.net.streams import open_stream
from pdserve.v1 import common_pb2, decode_pb2
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.worker import Worker

FORWARD_S = 0.005
VOCABULARY = 49_152
BLOCK_SIZE = 16
BATCH_SIZES = (1, 16, 64)
PROMPT_TOKENS = 16


class SleepingDecoder:
    """A decoder that returns logits from a buffer after `FORWARD_S`, and records the span of each full batch."""

    def __init__(self, batch_size: int) -> None:
        self._logits = torch.zeros(batch_size, VOCABULARY)
        self.spans: list[tuple[float, float]] = []

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        """Float32 [num_logits, VOCABULARY]."""
        started_at = time.perf_counter()
        time.sleep(FORWARD_S)
        if len(batch.token_ids) == len(self._logits):
            self.spans.append((started_at, time.perf_counter()))
        return self._logits[: len(batch.logits_rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Result of one run."""

    batch_size: int
    #: Time of a step outside the forward pass, median and 99th percentile in microseconds. It includes waiting for the
    #: interpreter's lock after the pass.
    gap_us: float
    gap_p99_us: float
    #: Processor time of the event loop's thread per token, in microseconds.
    edge_us_per_token: float


def _null_model(decoder: SleepingDecoder, batch_size: int, num_steps: int) -> Any:
    """The attributes of a loaded model that a worker uses; there is no checkpoint to load one from."""
    layout = KvLayout.uniform(
        model="null", dtype="bfloat16", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=1
    )
    pool = BlockPool(batch_size * ((PROMPT_TOKENS + num_steps) // BLOCK_SIZE + 2), BLOCK_SIZE)
    cache = KvCache(layout, pool.num_blocks, torch.device("cpu"))
    return SimpleNamespace(
        layout=layout,
        limits=SequenceLimits(max_model_len=8192, vocab_size=VOCABULARY),
        decoder=decoder,
        kernels=SimpleNamespace(backend="reference"),
        kv_cache=cache,
        pool=pool,
        runner=Runner(decoder, cache, Sampler()),
        core_leases=None,
        rank_group=None,
    )


async def serve(batch_size: int, num_steps: int) -> None:
    """Serves until standard input ends. Prints the worker's address, and at the end the case as JSON."""
    decoder = SleepingDecoder(batch_size)
    config = DecodeConfig(model="", redis_url="", threads=1, max_num_seqs=batch_size)
    async with AsyncExitStack() as stack:
        transport = InprocTransport()
        stack.push_async_callback(transport.close)
        worker = Worker(
            config=config,
            tier="decode",
            worker_id=WorkerId("decode"),
            epoch=new_epoch(),
            model=_null_model(decoder, batch_size, num_steps),
            transport=transport,
            metrics=WorkerMetrics(model_name="null", tier="decode"),
            tasks=await stack.enter_async_context(service_group()),
        )
        service = DecodeService(worker, config)
        await stack.enter_async_context(worker.computing(service))
        stack.push_async_callback(service.close)
        address, _ = await stack.enter_async_context(
            serve_grpc(service.register, [service.name], host="127.0.0.1", port=0, flag="", grace_s=0)
        )
        stream_address = await service.start(address)
        worker.calls.accept()
        print(stream_address, flush=True)
        started = time.thread_time()
        await asyncio.to_thread(sys.stdin.read)
        edge_s = time.thread_time() - started
    print(json.dumps(asdict(_case(decoder.spans[10:], edge_s, batch_size, num_steps))), flush=True)


def _case(spans: list[tuple[float, float]], edge_s: float, batch_size: int, num_steps: int) -> Case:
    gaps = sorted(later[0] - earlier[0] - FORWARD_S for earlier, later in pairwise(spans))
    return Case(
        batch_size=batch_size,
        gap_us=round(statistics.median(gaps) * 1e6, 1),
        gap_p99_us=round(gaps[len(gaps) * 99 // 100] * 1e6, 1),
        edge_us_per_token=round(edge_s / (batch_size * num_steps) * 1e6, 1),
    )


async def drive(address: str, batch_size: int, num_steps: int) -> None:
    """Runs `batch_size` concurrent streams to their ends."""
    async with asyncio.TaskGroup() as group:
        for index in range(batch_size):
            group.create_task(_stream(address, index, num_steps))


async def _stream(address: str, index: int, num_steps: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    start = decode_pb2.DecodeStart(
        ref=common_pb2.RequestRef(request_id=f"r{index:03}", attempt=1),
        prompt_token_ids=[index + 1] * PROMPT_TOKENS,
        sampling=sampling_to_wire(params),
        local_prefill_threshold=2**32 - 1,
    )
    stream = await open_stream(address, decode_pb2.DecodeResponse.FromString)
    await stream.write(decode_pb2.DecodeRequest(start=start))
    num_tokens = 0
    while num_tokens < num_steps and (event := await stream.read()) is not None:
        num_tokens += sum(len(choice.token_ids) for choice in event.tokens.choices)
    stream.close()


def measure(directory: Path, num_steps: int) -> list[Case]:
    """Runs all batch sizes once, with the worker and the benchmark of `directory`."""
    script = directory.resolve() / "benchmarks" / Path(__file__).name
    cases = []
    for size in BATCH_SIZES:
        with subprocess.Popen(
            [sys.executable, script, "--serve", str(size), "--steps", str(num_steps)],
            env=os.environ | {"PYTHONPATH": str(directory)},
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            asyncio.run(drive(worker.stdout.readline().strip(), size, num_steps))
            worker.stdin.close()
            cases.append(Case(**json.loads(worker.stdout.readline())))
    return cases


def medians(runs: list[list[Case]]) -> list[Case]:
    """Medians of each case over the runs."""
    fields = ("gap_us", "gap_p99_us", "edge_us_per_token")
    return [
        replace(cases[0], **{name: round(statistics.median(getattr(c, name) for c in cases), 1) for name in fields})
        for cases in zip(*runs, strict=True)
    ]


def table(here: list[Case], against: list[Case]) -> str:
    """Markdown: one row per case, in microseconds, before -> now."""
    lines = [
        "| batch | step without the forward pass | p99 | event loop's processor time for a token |",
        "| --- | --- | --- | --- |",
    ]
    for case, old in zip_longest(here, against):
        cells = [
            f"{getattr(old, name):.0f} -> {getattr(case, name):.0f}" if old else f"{getattr(case, name):.0f}"
            for name in ("gap_us", "gap_p99_us", "edge_us_per_token")
        ]
        lines.append(f"| {case.batch_size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured alternately with this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="directory of the raw results and the table")
    parser.add_argument("--serve", type=int, metavar="BATCH_SIZE", help="run as the worker of one run")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.steps))
        return
    here: list[list[Case]] = []
    against: list[list[Case]] = []
    for number in range(args.repeats):
        here.append(measure(Path(__file__).parents[1], args.steps))
        if args.against:
            against.append(measure(args.against, args.steps))
        print(f"run {number + 1} of {args.repeats} done", file=sys.stderr)
    shown = table(medians(here), medians(against))
    print(shown)
    if args.out:
        about = environment.describe()
        raw = {
            "environment": about,
            "forward_s": FORWARD_S,
            "steps": args.steps,
            "here": [[asdict(case) for case in run] for run in here],
            "against": [[asdict(case) for case in run] for run in against],
        }
        name = f"token-output-{about['date']}"
        page = environment.heading(about, "Microseconds, before -> now,") + shown + "\n"
        write_results(args.out, name, raw, page)


if __name__ == "__main__":
    main()
