"""`pdserve chaos`: breaks a cluster of its own in every way while requests run, and checks each answer.

Starts Redis, routers and workers, answers the requests once without faults, sends them again under a seeded plan of
faults, and compares. Exit code 1 if a token was wrong, missing or repeated, a request failed, or something is left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.base.config import load
from pdserve.cli.chaos.config import ChaosConfig
from pdserve.cli.run_dir import log_directory

_LOG_RUNS = 20


def main(argv: Sequence[str]) -> int:
    """Runs it; returns 1 if something does not hold. Raises `PdserveError` when it cannot run."""
    from pdserve.cli.chaos.run import run

    config = load(ChaosConfig, "chaos", argv, description=__doc__)
    with log_directory(config.log_dir, max_runs=_LOG_RUNS) as log_dir:
        summary = asyncio.run(run(config, log_dir, _say))
    if config.result is not None:
        Path(config.result).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _show(summary)
    return 1 if summary["violations"] else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _show(summary: dict[str, Any]) -> None:
    for name in ("requests", "faults", "pause_from_kill_to_next_token", "retry_reasons"):
        print(f"{name}: {json.dumps(summary[name])}")
    for violation in summary["violations"]:
        print(f"VIOLATION {violation}")
    replay = f"--seed {summary['settings']['seed']}"
    print(f"{len(summary['violations'])} violations in {summary['duration_s']} s; {replay} repeats the plan")
