"""Runs episodes in forked processes: one interpreter is imported once, and each episode leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from typing import Any

from tests.simulation.episode import Episode
from tests.simulation.mutations import MUTATIONS

#: Requests of an episode without faults that has to find a mutation.
_MUTATED = 40


def run_episode(
    seed: int, requests: int, faults: int, *, trace_file: str | None = None, mutation: str | None = None
) -> dict[str, Any]:
    """The report of one episode, which runs in a child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        if mutation is not None:
            MUTATIONS[mutation]()
        _child(writing, seed, requests, faults, trace_file)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"seed": seed, "violations": [f"the episode's process ended with status {status}"]}
    report: dict[str, Any] = json.loads(text)
    return report


def _child(writing: int, seed: int, requests: int, faults: int, trace_file: str | None) -> None:
    """Never returns: interpreters run `finally` blocks when they end, also those of dead simulated processes."""
    try:
        lines = open(trace_file, "w", encoding="utf-8") if trace_file else None  # noqa: SIM115 - until the end
        episode = Episode(seed, requests, faults, print_line=lines and (lambda line: print(line, file=lines)))
        text = episode.run().line()
        if lines is not None:
            lines.flush()
    except BaseException:  # noqa: BLE001 - reported to the parent
        text = json.dumps({"seed": seed, "violations": [f"the simulation itself failed: {traceback.format_exc()}"]})
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(text.encode())
    sys.stderr.flush()
    os._exit(0)


def run_all(arguments: argparse.Namespace) -> int:
    """Runs as many episodes as the requests make. Returns the exit status."""
    left, faults_left, seed, failed = arguments.requests, arguments.faults, arguments.seed, 0
    total: dict[str, float] = {}
    while left > 0:
        requests = min(arguments.episode, left)
        faults = round(faults_left * requests / left)
        report = run_episode(seed, requests, faults, trace_file=arguments.trace, mutation=arguments.mutation)
        print(json.dumps(report), flush=True)
        failed += bool(report["violations"])
        for name in ("requests", "faults", "virtual_s", "cpu_s"):
            total[name] = round(total.get(name, 0) + report.get(name, 0), 3)
        if failed and arguments.mutation:
            break
        left, faults_left, seed = left - requests, faults_left - faults, seed + 1
    if arguments.calm:
        report = run_episode(arguments.seed, arguments.calm, 0, mutation=arguments.mutation)
        print(json.dumps(report), flush=True)
        failed += bool(report["violations"])
    for mutation in filter(None, arguments.must_find.split(",")):
        seeds = (arguments.seed, arguments.seed + 1)  # With streams that go on elsewhere, and without.
        is_found = any(run_episode(seed, _MUTATED, 0, mutation=mutation)["violations"] for seed in seeds)
        print(json.dumps({"mutation": mutation, "found": is_found}), flush=True)
        failed += not is_found
    if arguments.replay:
        traces = {run_episode(seed, arguments.replay, arguments.replay // 10)["trace"] for _ in range(2)}
        total["replays_exactly"] = len(traces) == 1
        failed += len(traces) > 1
    print(json.dumps({"failed_episodes": failed, **total}), flush=True)
    return 1 if failed else 0
