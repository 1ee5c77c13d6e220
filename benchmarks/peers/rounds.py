"""Runs the rounds: in each, every system is started, measured and stopped, one after another in rotating order.

No two systems run at the same time, so none disturbs another, and a median covers as many starts as rounds. Before the
first round every system is started once, which warms caches and shows the memory that a start takes.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.environments import PeerUnavailable
from benchmarks.peers.load import WORKLOADS, Samples, Sizes
from benchmarks.peers.resources import PeakMemory, busy_percent, read_gb_per_s
from benchmarks.peers.rows import BURST, DECODE, MACHINE, MEMORY
from benchmarks.peers.servers import RunningServer, started
from benchmarks.peers.systems import CORES, System

_MIB = 1 << 20
#: Offset of the seed of uncounted bursts, whose prompts would otherwise be cached in the counted ones.
_ANOTHER_SEED = 1_000_000


@dataclass(slots=True)
class Findings:
    """Results of a run. `samples`: by system and measure, a list of samples per round."""

    samples: dict[str, dict[str, list[list[float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    #: By system, reasons for missing figures.
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, system: str, samples: Samples) -> None:
        """Adds the samples of a round."""
        for measure, values in samples.items():
            self.samples[system][measure].append(values)

    def medians(self) -> dict[tuple[str, str], list[float]]:
        """The median of each round, by system and measure."""
        return {
            (system, measure): [statistics.median(values) for values in rounds]
            for system, measures in self.samples.items()
            for measure, rounds in measures.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The run: its systems and sizes. `needs`: workloads by system; `kv_token_bytes`: K and V of one token."""

    systems: Sequence[System]
    needs: Mapping[str, set[str]]
    sizes: Sizes
    rounds: int
    seed: int
    kv_token_bytes: int
    log_dir: Path


def run(plan: RunPlan) -> Findings:
    """Runs all rounds. A system that cannot be measured is recorded and does not stop the others."""
    findings = Findings()
    start_peaks = {}
    for system in plan.systems:
        print(f"warming up: {system.label}", flush=True)
        try:
            start_peaks[system.key] = _warm_up(system, plan)
        except PeerUnavailable as error:
            _note(findings, system, error)
    systems = [system for system in plan.systems if system.key in start_peaks]
    for number in range(plan.rounds):
        findings.add(MACHINE, {"busy_percent": [busy_percent()], "read_gb_per_s": [read_gb_per_s(CORES)]})
        shift = number % max(1, len(systems))
        for system in systems[shift:] + systems[:shift]:
            print(f"round {number + 1} of {plan.rounds}: {system.label}", flush=True)
            try:
                _measure(system, plan, plan.seed + number, start_peaks[system.key], findings)
            except PeerUnavailable as error:
                _note(findings, system, error)
    return findings


def _note(findings: Findings, system: System, error: PeerUnavailable) -> None:
    print(f"  {system.label}: {error}", flush=True)
    findings.failures[system.key].append(str(error))


def _warm_up(system: System, plan: RunPlan) -> int:
    """Starts and stops a system; returns its peak memory in bytes."""
    memory = PeakMemory()
    with started(system, plan.log_dir) as starting, memory.watching(starting.process.pid):
        starting.wait_ready()
    return memory.peak_bytes


def _measure(system: System, plan: RunPlan, seed: int, start_peak_bytes: int, findings: Findings) -> None:
    """Starts a system once and runs all its workloads. Raises `PeerUnavailable`."""
    needed = plan.needs[system.key]
    with started(system, plan.log_dir) as starting:
        server = starting.wait_ready()
        findings.add(system.key, {"start_s": [server.start_s]})
        if MEMORY in needed:
            peak_bytes = max(start_peak_bytes, asyncio.run(_peak_under_load(server, plan.sizes, seed)))
            above_mib = (peak_bytes - system.weights_bytes - system.kv_bytes) / _MIB
            findings.add(system.key, {"memory_mib": [above_mib]})
        for name, workload in WORKLOADS.items():
            if name not in needed:
                continue
            samples = asyncio.run(workload(server.target, plan.sizes, seed))
            if name == DECODE:
                samples["read_gb_per_s"] = _read_rates(system, plan, samples["tpot_ms"])
            findings.add(system.key, samples)
            print("  " + ", ".join(f"{key} {statistics.median(values):.4g}" for key, values in samples.items()))


async def _peak_under_load(server: RunningServer, sizes: Sizes, seed: int) -> int:
    """Peak memory in bytes during a burst, which also warms the server up."""
    memory = PeakMemory()
    with memory.watching(server.pid):
        await WORKLOADS[BURST](server.target, sizes, seed - _ANOTHER_SEED)
    return memory.peak_bytes


def _read_rates(system: System, plan: RunPlan, tpots_ms: Sequence[float]) -> list[float]:
    """GB/s of weights and KV read by decoding: per token all weights and, on average, half of the output's KV."""
    tokens = plan.sizes.prompt_tokens + plan.sizes.output_tokens / 2
    return [(system.read_bytes + tokens * plan.kv_token_bytes) / (tpot_ms * 1e6) for tpot_ms in tpots_ms]
