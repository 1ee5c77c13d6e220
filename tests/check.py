"""`make check`: the tests that the present change can affect, nearest first, as many as fit into a minute.

A test is near if its module, or a conftest above it, imports what changed through few others. Files that Python does
not import have a table. Tests that start clusters or need other programs are left to `make test`, and counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import grimp

from tests.support import outcomes
from tests.support.lanes import BIN, BUILD

PACKAGES = (
    "tests",
    "benchmarks",
    "worker_svc",
    "router_svc",
    "prefill_svc",
    "decode_svc",
    "kvtransfer",
    "kernels",
    "pdserve",
)
#: Tests of files that no module imports, by prefix or suffix of the file. All that match count.
UNIMPORTED: Mapping[str, tuple[str, ...]] = {
    "kernels/cpu/": ("tests/unit/kernels", "tests/property/kernels"),
    "setup.py": ("tests/unit/kernels",),
    "proto/": ("tests/arch", "tests/unit/base", "tests/golden"),
    ".js": ("tests/unit/router_svc/api/console",),
    ".css": ("tests/unit/router_svc/api/console",),
    "k8s/": ("tests/deploy", "tests/dependencies"),
    "compose/": ("tests/deploy", "tests/dependencies"),
    ".md": ("tests/arch",),
    "pyproject.toml": ("tests/arch",),
    "constraints.txt": ("tests/arch", "tests/dependencies"),
    ".ci/": ("tests/arch",),
    "Makefile": ("tests/arch",),
}
#: Tests that start clusters, or wait for long.
LEFT_OUT = ("tests/chaos", "tests/fuzz", "tests/simulation", "tests/model_check")
#: Processor time for tests on each core, and what a test file without a record is taken to need.
BUDGET_S, UNKNOWN_S = 40.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Test files to run, nearest first, and how many are left out for which reason."""

    files: tuple[str, ...]
    num_beyond_budget: int
    num_left_out: int

    def __str__(self) -> str:
        total = len(self.files) + self.num_beyond_budget + self.num_left_out
        return (
            f"{len(self.files)} of {total} test files that the change can affect; left to make test: "
            f"{self.num_beyond_budget} beyond the time, {self.num_left_out} with clusters"
        )


def select(distances: Mapping[str, int], seconds: Mapping[str, float], *, budget_s: float) -> Selection:
    """Chooses test files by distance and, among equals, by duration, until `budget_s` is used up."""
    files, used_s, num_beyond, num_left_out = [], 0.0, 0, 0
    for file in sorted(distances, key=lambda file: (distances[file], seconds.get(file, UNKNOWN_S), file)):
        cost_s = seconds.get(file, UNKNOWN_S)
        if starts_clusters(file):
            num_left_out += 1
        elif files and used_s + cost_s > budget_s:
            num_beyond += 1
        else:
            files.append(file)
            used_s += cost_s
    return Selection(files=tuple(files), num_beyond_budget=num_beyond, num_left_out=num_left_out)


def starts_clusters(file: str) -> bool:
    """Whether a test file starts whole clusters: those of the folder tests/integration itself do."""
    path = PurePosixPath(file)
    return file.startswith(LEFT_OUT) or path.parent == PurePosixPath("tests/integration")


def distances_from(changed: Iterable[str], graph: grimp.ImportGraph, test_files: Sequence[str]) -> dict[str, int]:
    """Imports between each test file and what changed: 0 for a test that changed itself. Others are not in it."""
    found: dict[str, int] = {}
    modules = {module_of(file) for file in changed if file.endswith(".py")} & graph.modules
    for module, distance in _importers(modules, graph).items():
        file = module.replace(".", "/") + ".py"
        if file.rpartition("/")[2].startswith("test_"):
            found[file] = distance
    for file in changed:
        for pattern, suites in UNIMPORTED.items():
            if file.startswith(pattern) or file.endswith(pattern):
                near = (test for test in test_files if test.startswith(tuple(f"{suite}/" for suite in suites)))
                found |= {test: min(1, found.get(test, 1)) for test in near}
    return found


def module_of(file: str) -> str:
    """The module of a Python file."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(test_files: Iterable[str]) -> grimp.ImportGraph:
    """Who imports whom. A test imports the conftests of its folders, too: fixtures come from there."""
    graph = grimp.build_graph(*PACKAGES)
    for file in test_files:
        folder = module_of(file)
        while folder := folder.rpartition(".")[0]:
            if (conftest := f"{folder}.conftest") in graph.modules:
                graph.add_import(importer=module_of(file), imported=conftest)
    return graph


def _importers(modules: Iterable[str], graph: grimp.ImportGraph) -> dict[str, int]:
    distances = dict.fromkeys(modules, 0)
    queue = deque(distances)
    while queue:
        module = queue.popleft()
        for importer in graph.find_modules_that_directly_import(module) - distances.keys():
            distances[importer] = distances[module] + 1
            queue.append(importer)
    return distances


def _recorded_s() -> dict[str, float]:
    """Seconds that each test file took in the last run that had it."""
    recorded: dict[str, float] = {}
    for path in sorted(BUILD.glob("outcomes-*.jsonl"), key=lambda path: path.stat().st_mtime):
        seconds: Counter[str] = Counter()
        for outcome in outcomes.read(path):
            seconds[outcome.test.split("::")[0]] += outcome.seconds
        recorded |= seconds
    return recorded


def _changed(base: str) -> list[str]:
    """Files that differ from the commit `base`, and those that git does not know yet."""
    tracked = _git("diff", "--name-only", base, "--")
    return tracked + _git("ls-files", "--others", "--exclude-standard")


def _git(*arguments: str) -> list[str]:
    return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    """Returns the exit status: 0 if the linters and all chosen tests succeeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "the last commit; with nothing changed since, the one before"
    parser.add_argument("--base", help=f"commit to compare with (default: {default})")
    parser.add_argument("--list", action="store_true", help="show the tests and run none")
    arguments = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    changed = _changed(arguments.base or "HEAD") or _changed("HEAD~1")
    test_files = _git("ls-files", "--cached", "--others", "--exclude-standard", "tests/**/test_*.py")
    distances = distances_from(changed, import_graph(test_files), test_files)
    num_cores = len(os.sched_getaffinity(0))
    selection = select(distances, _recorded_s(), budget_s=BUDGET_S * num_cores)
    print(selection)
    if arguments.list:
        print(*selection.files, sep="\n")
        return 0
    lint = (("ruff", "check", "--quiet", "."), ("ruff", "format", "--quiet", "--check", "."), ("lint-imports",))
    for command in lint:
        done = subprocess.run((BIN / command[0], *command[1:]), capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr, sep="")
            return done.returncode
    files = [file for file in selection.files if Path(file).exists()]
    if not files:
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pytest = (BIN / "pytest", "-q", "-n", str(num_cores), "--no-loadscope-reorder", *files)
    status = subprocess.run(pytest, env=environment, check=False).returncode
    # Files whose tests all need another machine or another program have none to run.
    return 0 if status == 5 else status


if __name__ == "__main__":
    sys.exit(main())
