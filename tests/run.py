"""`make test`: the linters, all tests and those on a simulated GPU, at the same time, with their progress in view."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
LINT = (
    ("ruff", "check", "--quiet", "."),
    ("ruff", "format", "--quiet", "--check", "."),
    ("mypy", "--no-error-summary"),
    ("lint-imports", "--no-logo"),
    ("python", "-m", "tests.arch.generate_proto", "--check"),
)
#: One thread for each process: OpenMP's threads spin while they wait, and several processes share the cores.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
#: What only GPUs have, run on a simulated one (docs/decisions/0027-a-simulated-gpu.md).
SIMULATED_GPU = (
    "tests/unit/support/simulated_gpu",
    "tests/unit/engine/test_launches_on_device.py",
    "tests/unit/engine/test_layers_written.py",
    "tests/unit/engine/test_device_batch.py",
    "tests/unit/engine/test_waits_on_device.py",
    "tests/unit/kernels/test_choice.py::TestOnHardware",
    "tests/unit/kernels/triton/test_decoder.py::TestOnHardware",
    "tests/unit/worker/ranks/test_follower.py::TestOnHardware",
    "tests/unit/worker/kv_bytes/test_device_copies_on_device.py",
    "tests/integration/services/test_on_gpu.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One program to run, and what its environment has besides ours."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def lanes(*, num_workers: int) -> dict[str, tuple[Command, ...]]:
    """Commands by lane: lanes run at the same time, the commands of a lane one after the other."""
    simulated = Command(arguments=("pytest", *SIMULATED_GPU), environment={"PDSERVE_TEST_GPU": "simulated"})
    tests = Command(arguments=("pytest", "-n", str(num_workers), "--no-loadscope-reorder", "tests"))
    return {"lint": (*(Command(arguments=arguments) for arguments in LINT),), "gpu": (simulated,), "tests": (tests,)}


def _inherited() -> dict[str, str]:
    """Our environment. Bytecode is written: hundreds of processes, one after the other, import the same modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def _run(lane: str, command: Command, counts: Counter[str]) -> bool:
    """Runs one command, prints its lines as they come, and adds what pytest counted. True if it succeeded."""
    program, *arguments = command.arguments
    process = await asyncio.create_subprocess_exec(
        BIN / program,
        *arguments,
        env={**_inherited(), **ENVIRONMENT, **command.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    summary = ""
    async for line in process.stdout:
        text = line.decode(errors="replace").rstrip()
        print(f"[{lane}] {text}", flush=True)
        if re.match(r"=+ .*\d+ (passed|failed|error)", text):
            summary = text
    counts.update({outcome.rstrip("s"): int(number) for number, outcome in re.findall(r"(\d+) ([a-z]+)", summary)})
    return await process.wait() == 0


async def _run_lane(lane: str, commands: tuple[Command, ...], counts: Counter[str]) -> list[str]:
    """The commands of a lane that failed."""
    failed = []
    for command in commands:
        started_at = time.monotonic()
        succeeded = await _run(lane, command, counts)
        name = " ".join(command.arguments[:3])
        outcome = "ok" if succeeded else "FAILED"
        print(f"[{lane}] {name}: {outcome} in {time.monotonic() - started_at:.0f} s", flush=True)
        if not succeeded:
            failed.append(f"{lane}: {name}")
    return failed


async def _run_all(num_workers: int) -> int:
    counts: Counter[str] = Counter()
    started_at = time.monotonic()
    results = await asyncio.gather(
        *(_run_lane(lane, commands, counts) for lane, commands in lanes(num_workers=num_workers).items())
    )
    failed = [name for result in results for name in result]
    for name in failed:
        print(f"FAILED {name}")
    print(f"All lanes ended after {time.monotonic() - started_at:.0f} s.")
    print(f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped")
    return 1 if failed else 0


def main() -> int:
    """Returns the exit status: 0 if everything succeeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    # Two of them run the tests with clusters, which mostly wait; more would take more memory than time.
    default = len(os.sched_getaffinity(0)) + 2
    parser.add_argument("--workers", type=int, default=default, help="pytest processes of the main lane")
    return asyncio.run(_run_all(parser.parse_args().workers))


if __name__ == "__main__":
    sys.exit(main())
