"""`make test`: the linters, all tests and those on a simulated GPU, in two lanes at the same time."""

from __future__ import annotations

import argparse
import os
import sys

from tests.support.lanes import Command, Run, counted, run_lanes

LINT = (
    ("ruff", "check", "--quiet", "."),
    ("ruff", "format", "--quiet", "--check", "."),
    ("mypy", "--no-error-summary"),
    ("lint-imports", "--no-logo"),
    ("python", "-m", "tests.arch.generate_proto", "--check"),
)
#: What only GPUs have, run on a simulated one (docs/decisions/0027-a-simulated-gpu.md).
SIMULATED_GPU = (
    "tests/unit/support/simulated_gpu",
    "tests/unit/engine/test_launches_on_device.py",
    "tests/unit/engine/test_layers_written.py",
    "tests/unit/engine/test_device_batch.py",
    "tests/unit/engine/test_waits_on_device.py",
    "tests/unit/kernels/test_choice.py::TestOnHardware",
    "tests/unit/kernels/triton/test_decoder.py::TestOnHardware",
    "tests/unit/model/test_device_weights.py::TestOnHardware",
    "tests/unit/worker/ranks/test_follower.py::TestOnHardware",
    "tests/unit/worker/kv_bytes/test_device_copies_on_device.py",
    "tests/unit/worker/kv_bytes/test_device_offers.py",
    "tests/integration/kvtransfer/handover/test_between_gpu_caches.py",
    "tests/integration/services/test_on_gpu.py",
)
#: Tests of real processes: they wait for each other more than they compute.
PROCESSES = ("tests/chaos", "tests/integration", "tests/unit/cli")
#: What computes leaves the cores to what waits: a test of processes finds one when something has happened.
_NICENESS = 19


def lanes(*, num_workers: int, niceness: int = _NICENESS) -> dict[str, tuple[Command, ...]]:
    """Commands by lane. `num_workers`: pytest processes of each lane; `niceness`: of what computes."""
    options = ("-n", str(num_workers), "--no-loadscope-reorder", "--durations=50")
    rest = (*(f"--ignore={folder}" for folder in PROCESSES), "tests")
    computing = (
        *(Command(arguments=arguments, niceness=niceness) for arguments in LINT),
        Command(arguments=("pytest", *SIMULATED_GPU), environment={"PDSERVE_TEST_GPU": "simulated"}, niceness=niceness),
        Command(arguments=("pytest", *options, *rest), niceness=niceness),
    )
    return {"processes": (Command(arguments=("pytest", *options, *PROCESSES)),), "computing": computing}


def _last_line(run: Run) -> str:
    counts = run.counts
    # Linters and processes that crashed have no test that failed.
    counts["failed"] += sum(1 for each in run.ended if each.exit_status and not each.failures)
    return counted(counts)


def main() -> int:
    """Returns the exit status: 0 if everything succeeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    num_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=num_cores, help="pytest processes of each lane")
    parser.add_argument("--niceness", type=int, default=_NICENESS, help="niceness of what computes")
    arguments = parser.parse_args()
    run = run_lanes(lanes(num_workers=arguments.workers, niceness=arguments.niceness))
    print(_last_line(run))
    return 0 if run.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
