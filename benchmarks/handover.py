"""The handover's waterfall on an idle cluster, compared with a cluster without prefill workers in the same run.

    python -m benchmarks.handover [--prompts 128,1024,4000] [--repeats 5] [--kernels auto] [--layer-groups 1]
        [--out benchmarks/results]

Requests are sent one at a time through the OpenAI API: seeded random prompts, greedy, 16 tokens. Phases come from the
request's trace (router's clock), gaps from the client. Figures are medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.result_files import write_results
from pdserve.cli.router_client import get
from tests.support.cluster import MODEL, Cluster, running_cluster

NUM_TOKENS = 16
VOCABULARY = 40_000

Row = dict[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measurements of one request, in seconds; phases are relative to its acceptance by the router."""

    prompt_tokens: int
    ttft_s: float
    #: Gap between the first and the second token, at the client.
    second_token_gap_s: float
    #: Median gap between later tokens, at the client.
    tpot_s: float
    phases: dict[str, float]
    reported: dict[str, float]

    def phase(self, start: str, end: str) -> float | None:
        """Seconds from one phase to another; None if one did not happen."""
        if start not in self.phases or end not in self.phases:
            return None
        return self.phases[end] - self.phases[start]


async def measure(cluster: Cluster, prompt: list[int]) -> Sample:
    """Sends one streamed request and reads its trace."""
    async with cluster.async_client() as client:
        started_at = time.perf_counter()
        at: list[float] = []
        request_id = ""
        stream = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            request_id = chunk.id
            # A token of an incomplete character has no text, so tokens are counted, not texts.
            tokens = chunk.choices[0].logprobs.tokens if chunk.choices and chunk.choices[0].logprobs else None
            at += [time.perf_counter()] * len(tokens or [])
    trace: dict[str, Any] = json.loads(get(cluster.base_url, f"/v1/requests/{request_id}/trace"))
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    return Sample(
        prompt_tokens=len(prompt),
        ttft_s=at[0] - started_at,
        second_token_gap_s=gaps[0],
        tpot_s=statistics.median(gaps[1:]),
        phases=trace["phases"],
        reported=trace["reported"],
    )


def run(name: str, flags: list[str], lengths: list[int], repeats: int, seed: int) -> list[Sample]:
    """Starts a cluster and returns all samples measured on it."""
    print(f"{name}: starting")
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *flags) as cluster:
        cluster.until(lambda: _is_populated(cluster), "the KV memory is populated", timeout_s=120)
        rng = random.Random(seed)
        samples = []
        for length in lengths:
            for number in range(repeats + 1):
                prompt = [rng.randrange(100, VOCABULARY) for _ in range(length)]
                sample = asyncio.run(measure(cluster, prompt))
                cluster.wait_idle()
                if number:  # The first warms up connections and code paths.
                    samples.append(sample)
            print(f"{name}: {length} tokens done")
    return samples


def _is_populated(cluster: Cluster) -> bool:
    logs = [path for path in cluster.log_dir.glob("*.log") if path.name.startswith(("prefill", "decode"))]
    return bool(logs) and all("kv_cache_" in path.read_text(encoding="utf-8") for path in logs)


def rows(disaggregated: list[Sample], monolithic: list[Sample], lengths: list[int]) -> list[Row]:
    """One row per prompt length, in milliseconds, MB and GB/s."""
    return [
        _row(
            length,
            [sample for sample in disaggregated if sample.prompt_tokens == length],
            [sample for sample in monolithic if sample.prompt_tokens == length],
        )
        for length in lengths
    ]


def _row(length: int, disaggregated: list[Sample], monolithic: list[Sample]) -> Row:
    def phase(start: str, end: str) -> float | None:
        return _median_ms([sample.phase(start, end) for sample in disaggregated])

    bytes_sent = statistics.median(sample.reported.get("sent_bytes", 0) for sample in disaggregated)
    wire_s = statistics.median(sample.reported.get("transfer_s", 0) for sample in disaggregated)
    gap = _median_ms([sample.second_token_gap_s for sample in disaggregated])
    tpot = _median_ms([sample.tpot_s for sample in disaggregated])
    return {
        "prompt_tokens": length,
        "admit_ms": _median_ms([sample.phases["admitted"] for sample in disaggregated]),
        "reserve_ms": phase("admitted", "reserved"),
        "dispatch_ms": phase("reserved", "prefill_start"),
        "prefill_ms": phase("prefill_start", "first_token"),
        "first_write_ms": phase("first_token", "first_write"),
        "commit_after_first_token_ms": phase("first_token", "commit"),
        "first_decode_after_commit_ms": phase("commit", "first_decode"),
        "kv_mb": round(bytes_sent / 1e6, 1),
        "wire_ms": round(1000 * wire_s, 2),
        "exposed_ms": _median_ms([sample.reported.get("exposed_s") for sample in disaggregated]),
        "wire_gb_per_s": round(bytes_sent / wire_s / 1e9, 2) if wire_s else None,
        "ttft_ms": _median_ms([sample.ttft_s for sample in disaggregated]),
        "second_token_gap_ms": gap,
        "tpot_ms": tpot,
        "gap_in_tpot": round(gap / tpot, 2) if gap and tpot else None,
        "monolith_ttft_ms": _median_ms([sample.ttft_s for sample in monolithic]),
        "monolith_gap_ms": _median_ms([sample.second_token_gap_s for sample in monolithic]),
        "monolith_tpot_ms": _median_ms([sample.tpot_s for sample in monolithic]),
    }


def _median_ms(values_s: Sequence[float | None]) -> float | None:
    known = [value for value in values_s if value is not None]
    return round(1000 * statistics.median(known), 2) if known else None


def table(results: list[Row]) -> str:
    """The rows as Markdown, one column per prompt length."""
    names = list(results[0])
    lines = ["| | " + " | ".join(str(row["prompt_tokens"]) + " tokens" for row in results) + " |"]
    lines.append("| --- |" + " ---: |" * len(results))
    for name in names[1:]:
        cells = ["–" if row[name] is None else f"{row[name]:g}" for row in results]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="128,1024,4000", help="prompt lengths in tokens")
    parser.add_argument("--repeats", type=int, default=5, help="counted requests per length")
    parser.add_argument("--kernels", default="auto", help="kernel backend; layer groups need reference")
    parser.add_argument("--layer-groups", type=int, default=1, help="messages per KV block")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result files")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.prompts.split(",")]
    shared = (lengths, arguments.repeats, arguments.seed)
    kernels, groups = ["--kernels", arguments.kernels], ["--layer-groups", str(arguments.layer_groups)]
    disaggregated = run("1 prefill + 1 decode", ["--local-prefill-threshold", "0", *kernels, *groups], *shared)
    monolithic = run("--prefill 0", ["--prefill", "0", *kernels], *shared)
    results = rows(disaggregated, monolithic, lengths)
    environment = describe()
    suffix = "" if arguments.layer_groups == 1 else f"-{arguments.layer_groups}-layer-groups"
    raw = {
        "environment": environment,
        "workload": {"model": MODEL, "dtype": "bfloat16", "max_tokens": NUM_TOKENS, **vars(arguments)} | {"out": None},
        "rows": results,
        "samples": {
            "disaggregated": [asdict(sample) for sample in disaggregated],
            "monolithic": [asdict(sample) for sample in monolithic],
        },
    }
    page = (
        f"# Handover on an idle cluster, {environment['date']}\n\n{environment['cpu']}, {environment['cores']} cores, "
        f"torch {environment['packages']['torch']}, commit {environment['commit']}; {MODEL}, bfloat16; "  # type: ignore[index]
        f"kernels {arguments.kernels}, layer groups {arguments.layer_groups}; "
        f"medians of {arguments.repeats}, seed {arguments.seed}.\n\n{table(results)}\n"
    )
    print(table(results))
    write_results(arguments.out, f"handover{suffix}-{environment['date']}", raw, page)


if __name__ == "__main__":
    main()
