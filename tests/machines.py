"""`python -m tests.machines [NAME...]`: suites that a machine can affect, under the settings of other machines.

Each row is one setting with the suites it can affect. The settings stand for other machines: libraries without
AVX-512, each instruction set of the kernels, one core, half a core, and steps that take next to no time. More rows run
what takes too long for `make test`: the model's exactness at full depth, larger searches, a router that is killed, and
all faults at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernels.choice import instruction_sets
from tests.support import cgroups

_INTEGRATION = Path(__file__).parent / "integration"
KERNELS = ("tests/unit/kernels", "tests/property/kernels")
ENGINE = ("tests/unit/engine", "tests/property/engine")
EXACTNESS = ("tests/property/model", "tests/golden")
ANSWERS = ("tests/integration/test_exactness.py",)
#: Tests that start clusters or share them: all files of the folder.
SHARED_CLUSTERS = tuple(sorted(f"tests/integration/{file.name}" for file in _INTEGRATION.glob("test_*.py")))
CHAOS = ("tests/chaos/test_chaos_command.py",)
WORKER_LOST = ("tests/chaos/test_worker_lost.py",)
#: Chaos tests that hold with any model. The others ask the default model questions or never load one.
ANY_MODEL = (*WORKER_LOST, "tests/chaos/test_redis_lost.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting and the suites that run under it."""

    name: str
    suites: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Words in front of the command, such as `taskset -c 0`.
    prefix: tuple[str, ...] = ()
    #: Quota for all processes together, in cores.
    cores: float | None = None

    def command(self) -> list[str]:
        """The whole command. Joined by spaces, it can be pasted into a shell."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return ["env", *variables, *self.prefix, sys.executable, "-m", "pytest", "-q", *self.suites]


def rows() -> list[Row]:
    """Every row that this machine can run."""
    haswell = {"OPENBLAS_CORETYPE": "Haswell"}
    found = [
        Row(name="torch-avx2", suites=KERNELS + ENGINE + EXACTNESS, environment={"ATEN_CPU_CAPABILITY": "avx2"}),
        Row(name="blas-haswell", suites=KERNELS, environment=haswell),
        Row(name="blas-skylakex", suites=KERNELS, environment={"OPENBLAS_CORETYPE": "SkylakeX"}),
        Row(
            name="no-avx512",
            suites=KERNELS + ENGINE + EXACTNESS,
            environment={**haswell, "ATEN_CPU_CAPABILITY": "avx2", "NPY_DISABLE_CPU_FEATURES": "X86_V4"},
        ),
        Row(name="one-core", suites=ENGINE + ANSWERS + WORKER_LOST, prefix=("taskset", "-c", "0")),
        Row(name="half-a-core", suites=WORKER_LOST, cores=0.5),
        Row(name="fast-steps", suites=ANY_MODEL, environment={"PDSERVE_TEST_MODEL": "one-layer"}),
        Row(
            name="full-depth",
            suites=(
                "tests/property/model",
                "tests/property/engine",
                "tests/property/decode_svc",
                "tests/property/prefill_svc",
                "tests/property/router_svc/api",
                "tests/unit/decode_svc",
                "tests/unit/kernels",
                "tests/unit/benchmarks/test_gpu.py",
                "tests/unit/engine/test_step_ahead_on_device.py",
                "tests/integration/test_structured_output.py",
                "tests/integration/test_token_rules.py",
                "tests/integration/test_several_models.py",
                "tests/golden/test_default_model.py",
                "tests/integration/router_svc/request/test_resume.py",
                "tests/integration/router_svc/request/test_resume_limits.py",
                "tests/integration/services/test_ranks.py",
                "tests/integration/services/test_segments.py",
                *SHARED_CLUSTERS,
                *ANY_MODEL,
            ),
            environment={"PDSERVE_TEST_DEPTH": "full"},
        ),
        Row(
            name="searches",
            suites=("tests/model_check", "tests/simulation"),
            environment={"PDSERVE_TEST_DEPTH": "full"},
        ),
        Row(
            name="killed-router",
            suites=("tests/integration/router_svc/test_killed_router.py",),
            environment={"PDSERVE_TEST_DEPTH": "full"},
        ),
        Row(
            name="chaos",
            suites=(
                *CHAOS,
                "tests/chaos/test_cannot_start.py",
                "tests/chaos/test_drain.py",
                "tests/chaos/test_poison.py",
                "tests/chaos/test_rank_lost.py",
                "tests/chaos/test_roles.py",
                "tests/chaos/test_rolling_restart.py",
                "tests/chaos/test_router_lost.py",
                "tests/chaos/test_short_of_blocks.py",
                "tests/chaos/test_unequal_workers.py",
            ),
            environment={"PDSERVE_TEST_DEPTH": "full"},
        ),
        Row(
            name="chaos-hour",
            suites=CHAOS,
            environment={"PDSERVE_TEST_DEPTH": "full", "PDSERVE_TEST_CHAOS_REQUESTS": "5000"},
        ),
        Row(
            name="ucx-without-guard",
            suites=("tests/chaos/test_ucx_garbage.py",),
            environment={"PDSERVE_TEST_DEPTH": "full"},
        ),
        Row(
            name="full-depth-gpu",
            suites=(
                "tests/integration/services/test_on_gpu.py",
                "tests/integration/services/test_cluster_on_gpu.py",
                "tests/unit/benchmarks/test_gpu_simulated.py",
                "tests/unit/kernels/triton/test_decoder.py::TestOnHardware",
            ),
            environment={"PDSERVE_TEST_DEPTH": "full", "PDSERVE_TEST_GPU": "simulated"},
        ),
    ]
    for name in instruction_sets():
        services = ("PREFILL", "DECODE")
        environment = {f"PDSERVE_{service}__INSTRUCTION_SET": name for service in services}
        found.append(Row(name=f"instruction-set-{name}", suites=ANSWERS, environment=environment))
    return found


def run(row: Row) -> str:
    """Run a row. Returns "passed", "failed", or why it could not run."""
    print(f"\n{row.name}: {' '.join(row.command())}", flush=True)
    if row.cores is None:
        return _outcome(row.command())
    try:
        with cgroups.quota(row.cores) as members:
            return _outcome(cgroups.joining(members, row.command()))
    except OSError as error:
        return f"not run: creating a cgroup with a quota failed ({error})"


def _outcome(command: list[str]) -> str:
    return "failed" if subprocess.run(command, check=False).returncode else "passed"


def main() -> int:
    """Run the named rows, or all, and list the results. Returns 1 if one failed."""
    all_rows = {row.name: row for row in rows()}
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows to run (default: all): {', '.join(all_rows)}")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and run none")
    arguments = parser.parse_args()
    if arguments.list:
        print(*all_rows, sep="\n")
        return 0
    names = arguments.names or list(all_rows)
    unknown = set(names) - set(all_rows)
    if unknown:
        parser.error(f"Unknown rows: {', '.join(sorted(unknown))}. Choose from: {', '.join(all_rows)}.")
    results: list[str] = []
    for name in names:
        started = time.monotonic()
        results.append(f"{name:32} {run(all_rows[name])}, {time.monotonic() - started:.0f} s")
    print("", *results, sep="\n")
    return int(any(" failed, " in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
