"""`python -m tests.machines [NAME...]`: the tests that a machine can change, under the settings of other machines.

Each row is one setting with the suites that it can change; not every setting meets every suite. Settings stand for
machines: libraries without AVX-512, each instruction set of the kernels, one core, half a core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kernels.choice import instruction_sets

KERNELS = ("tests/unit/kernels", "tests/property/kernels")
ENGINE = ("tests/unit/engine", "tests/property/engine")
EXACTNESS = ("tests/property/model", "tests/golden")
ANSWERS = ("tests/integration/test_exactness.py",)
CHAOS = ("tests/chaos/test_worker_lost.py",)
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting and the suites that run under it."""

    name: str
    suites: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Words before the command.
    prefix: tuple[str, ...] = ()
    #: Share of one core that all processes have together.
    cores: float | None = None

    def command(self) -> list[str]:
        """The whole command, which can be pasted into a shell after `env`."""
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
        Row(name="one-core", suites=ENGINE + ANSWERS + CHAOS, prefix=("taskset", "-c", "0")),
        Row(name="half-a-core", suites=CHAOS, cores=0.5),
    ]
    for name in instruction_sets():
        services = ("PREFILL", "DECODE")
        environment = {f"PDSERVE_{service}__INSTRUCTION_SET": name for service in services}
        found.append(Row(name=f"instruction-set-{name}", suites=ANSWERS, environment=environment))
    return found


@contextmanager
def _quota(cores: float) -> Iterator[Path]:
    """A cgroup, of version 1 or 2, with that much time on the cores. Raises `OSError` where none can be made."""
    is_second = (_CGROUPS / "cgroup.controllers").exists()
    group = (_CGROUPS if is_second else _CGROUPS / "cpu") / f"pdserve-tests-{os.getpid()}"
    group.mkdir()
    try:
        quota = int(cores * _PERIOD_US)
        if is_second:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield group / "cgroup.procs"
    finally:
        # Its processes have ended; the kernel may still count one.
        with suppress(OSError):
            group.rmdir()


def run(row: Row) -> str:
    """Run a row: "passed", "failed", or why it could not run."""
    print(f"\n{row.name}: {' '.join(row.command())}", flush=True)
    if row.cores is None:
        return _outcome(row.command())
    try:
        with _quota(row.cores) as members:
            return _outcome(["sh", "-c", f'echo $$ > {members} && exec "$@"', "sh", *row.command()])
    except OSError as error:
        return f"not run: no cgroup with a quota can be made ({error})"


def _outcome(command: list[str]) -> str:
    return "failed" if subprocess.run(command, check=False).returncode else "passed"


def main() -> int:
    """Run the named rows, or all, and list the results. 1 when one failed."""
    every = {row.name: row for row in rows()}
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows to run (default: all): {', '.join(every)}")
    names = parser.parse_args().names or list(every)
    unknown = set(names) - set(every)
    if unknown:
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}. Known: {', '.join(every)}.")
    results: list[str] = []
    for name in names:
        started = time.monotonic()
        results.append(f"{name:32} {run(every[name])}, {time.monotonic() - started:.0f} s")
    print("", *results, sep="\n")
    return int(any(" failed, " in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
