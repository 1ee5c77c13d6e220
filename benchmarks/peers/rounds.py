"""Runs the rounds: in each, every system is started, measured and stopped, one after the other in changing order.

No two systems run at the same time, so none disturbs another, and a median is over as many starts as rounds. Before
the first round everything is started once: caches are warm then, and what a start takes of memory is seen.
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
from benchmarks.peers.machine import PeakMemory, busy_percent, read_gb_per_s
from benchmarks.peers.rows import BURST, DECODE, MACHINE, MEMORY
from benchmarks.peers.servers import RunningServer, started
from benchmarks.peers.systems import CORES, System

_MIB = 1 << 20
#: Keeps a burst that is not counted from being repeated as one that is: its prompts would be cached.
_ANOTHER_SEED = 1_000_000


@dataclass(slots=True)
class Findings:
    """What a run found. `samples`: by system and measure, a list of samples for each round."""

    samples: dict[str, dict[str, list[list[float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    #: By system, why it has no figures, or not all of them.
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, system: str, samples: Samples) -> None:
        """The samples of a round."""
        for measure, values in samples.items():
            self.samples[system][measure].append(values)

    def medians(self) -> dict[tuple[str, str], list[float]]:
        """By system and measure, the median of each round."""
        return {
            (system, measure): [statistics.median(values) for values in rounds]
            for system, measures in self.samples.items()
            for measure, rounds in measures.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. `needs`: by system, its workloads; `kv_token_bytes`: K and V of one token."""

    systems: Sequence[System]
    needs: Mapping[str, set[str]]
    sizes: Sizes
    rounds: int
    seed: int
    kv_token_bytes: int
    log_dir: Path


def run(plan: Plan) -> Findings:
    """All rounds. What cannot be measured is in the findings; it does not stop the others."""
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


def _warm_up(system: System, plan: Plan) -> int:
    """Starts and stops it, and returns the most bytes it held meanwhile."""
    memory = PeakMemory()
    with started(system, plan.log_dir) as starting, memory.watching(starting.process.pid):
        starting.wait_ready()
    return memory.peak_bytes


def _measure(system: System, plan: Plan, seed: int, start_peak_bytes: int, findings: Findings) -> None:
    """One start of one system, with all it is needed for. Raises `PeerUnavailable`."""
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
    """The most bytes held during a burst, which also warms up what comes after."""
    memory = PeakMemory()
    with memory.watching(server.pid):
        await WORKLOADS[BURST](server.target, sizes, seed - _ANOTHER_SEED)
    return memory.peak_bytes


def _read_rates(system: System, plan: Plan, tpots_ms: Sequence[float]) -> list[float]:
    """GB/s of weights and KV that decoding reads: all weights and half of the output's KV, on average, each token."""
    tokens = plan.sizes.prompt_tokens + plan.sizes.output_tokens / 2
    return [(system.read_bytes + tokens * plan.kv_token_bytes) / (tpot_ms * 1e6) for tpot_ms in tpots_ms]
