"""Runs commands in lanes, and says how the tests in them ended: what failed, and what passed only when repeated.

A failure that is nothing but a wait in a test on the real clock may be a stall of the machine. At most three such
tests are repeated after everything else has ended, and each has to pass three times of three. Nothing else is repeated.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support import outcomes, stalls
from tests.support.outcomes import Outcome

BIN = Path(sys.executable).parent
#: Where logs, outcomes and failures are kept.
BUILD = Path("build")
#: One thread for each process: OpenMP's threads spin while they wait, and several processes share the cores.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
MAX_REPEATED, NUM_REPETITIONS = 3, 3
#: Failures that are listed at the end. What is beyond them is in the files.
_MAX_LISTED = 12
_REPEATS = "repeats"
#: A comparison that failed can be one long line.
_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One program to run, what its environment has besides ours, and its niceness."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
    #: Arguments of pytest with which single tests are repeated.
    repeat_options: tuple[str, ...] = ()

    @property
    def is_pytest(self) -> bool:
        """Whether it reports outcomes of tests."""
        return self.arguments[0] == "pytest"

    @property
    def name(self) -> str:
        """How it is called in the report."""
        return " ".join(self.arguments[:3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended, and the outcomes of its tests."""

    lane: str
    command: Command
    exit_status: int
    outcomes: tuple[Outcome, ...] = ()

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Its tests that failed."""
        return tuple(each for each in self.outcomes if each.outcome == "failed")


def may_repeat(ended: Sequence[Ended]) -> bool:
    """Whether everything that failed was a wait on the real clock, in few enough tests: repeating may help."""
    failed = [each for each in ended if each.exit_status]
    failures = [failure for each in failed for failure in each.failures]
    return (
        bool(failures)
        # A command that failed without a failed test has crashed, or is no test.
        and all(each.command.is_pytest and each.failures and each.exit_status == 1 for each in failed)
        and all(failure.is_wait and failure.is_real_time for failure in failures)
        and len({failure.test for failure in failures}) <= MAX_REPEATED
    )


async def _run(lane: str, command: Command, name: str) -> Ended:
    """Runs one command and prints its lines as they come. `name`: of its files in `BUILD`."""
    program, *arguments = command.arguments
    outcome_file = BUILD / f"outcomes-{name}.jsonl"
    if command.is_pytest:
        arguments += ["--outcomes", str(outcome_file), f"--junit-xml={BUILD / f'junit-{name}.xml'}"]
        outcome_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(("nice", "-n", str(command.niceness)) if command.niceness else ()),
        BIN / program,
        *arguments,
        env={**_inherited(), **ENVIRONMENT, **command.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_MAX_LINE_BYTES,
    )
    assert process.stdout is not None
    with (BUILD / f"log-{name}.txt").open("w", encoding="utf-8") as log:
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            print(f"[{lane}] {text}", flush=True)
            log.write(text + "\n")
    exit_status = await process.wait()
    found = tuple(outcomes.read(outcome_file)) if command.is_pytest else ()
    return Ended(lane=lane, command=command, exit_status=exit_status, outcomes=found)


def _inherited() -> dict[str, str]:
    """Our environment. Bytecode is written: hundreds of processes, one after the other, import the same modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def _run_lane(lane: str, commands: Sequence[Command]) -> list[Ended]:
    ended = []
    for number, command in enumerate(commands):
        started_at = time.monotonic()
        ended.append(await _run(lane, command, f"{lane}-{number}"))
        outcome = "FAILED" if ended[-1].exit_status else "ok"
        print(f"[{lane}] {command.name}: {outcome} in {time.monotonic() - started_at:.0f} s", flush=True)
    return ended


async def _repeat(ended: Sequence[Ended]) -> list[str]:
    """Repeats what failed, alone, one test after the other. Returns the tests that passed every time."""
    passed = []
    for each in ended:
        for test in sorted({failure.test for failure in each.failures}):
            command = Command(
                arguments=("pytest", "-m", "", *each.command.repeat_options, test),
                environment=each.command.environment,
            )
            for number in range(NUM_REPETITIONS):
                again = await _run(_REPEATS, command, f"{_REPEATS}-{len(passed)}-{number}")
                if again.exit_status:
                    break
            else:
                passed.append(test)
    return passed


def _keep_failures(lane: str, failures: Iterable[Outcome], watch: stalls.MachineWatch) -> list[str]:
    """Writes the failures of a lane to a file in `BUILD`, and returns a line for each."""
    lines = []
    with (BUILD / f"failures-{lane}.jsonl").open("w", encoding="utf-8") as file:
        for failure in failures:
            meanwhile = watch.between(failure.started_at, failure.ended_at)
            entry = asdict(failure) | asdict(meanwhile) | {"seconds": failure.seconds, "processor": stalls.processor()}
            file.write(json.dumps(entry) + "\n")
            kind = "; a wait" if failure.is_wait and failure.is_real_time else ""
            lines.append(f"FAILED {failure.test}: {failure.message} ({failure.seconds:.1f} s; {meanwhile}{kind})")
    return lines


def _unstable_entry(failure: Outcome) -> str:
    """What to add to tests/unstable.toml for a test that passed when it was repeated."""
    date = dt.datetime.fromtimestamp(failure.started_at, dt.UTC).date()
    fields = {"test": failure.test, "date": str(date), "symptom": failure.message, "processor": stalls.processor()}
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()) + ", count = 1 }"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of all lanes, with what was repeated."""

    ended: Sequence[Ended]
    #: Tests that failed and then passed three times of three.
    repeated: Sequence[str]

    @property
    def succeeded(self) -> bool:
        """Whether every command succeeded, or all of its failures passed when they were repeated."""
        return all(
            not each.exit_status or (each.failures and {failure.test for failure in each.failures} <= {*self.repeated})
            for each in self.ended
        )

    @property
    def counts(self) -> Counter[str]:
        """Tests by outcome. One that passed when it was repeated counts as passed."""
        states = {
            (each.lane, each.command.name, outcome.test): outcome.outcome
            if outcome.test not in self.repeated
            else "passed"
            for each in self.ended
            for outcome in sorted(each.outcomes, key=lambda outcome: outcome.outcome == "failed")
        }
        return Counter(states.values())


def run_lanes(lanes: Mapping[str, Sequence[Command]]) -> Run:
    """Runs the lanes at the same time, the commands of a lane one after the other; then repeats what may be repeated.

    Prints what failed, with the machine's state meanwhile. The caller prints the last lines.
    """
    BUILD.mkdir(exist_ok=True)
    for old in BUILD.glob("failures-*.jsonl"):
        old.unlink()
    with stalls.watching() as watch:
        run = asyncio.run(_run_all(lanes))
    lines = [f"FAILED {each.lane}: {each.command.name}" for each in run.ended if each.exit_status and not each.failures]
    for lane in lanes:
        failures = [failure for each in run.ended if each.lane == lane for failure in each.failures]
        if failures:
            lines += _keep_failures(lane, failures, watch)
    if lines:
        print(f"On {stalls.processor()}:", *lines[:_MAX_LISTED], sep="\n")
    if len(lines) > _MAX_LISTED:
        print(f"... and {len(lines) - _MAX_LISTED} more in {BUILD}/failures-*.jsonl")
    for failure in (failure for each in run.ended for failure in each.failures):
        if failure.test in run.repeated:
            print(f"tests/unstable.toml: {_unstable_entry(failure)}")
    if run.repeated:
        print(f"Passed only when repeated: {', '.join(run.repeated)}")
    return run


async def _run_all(lanes: Mapping[str, Sequence[Command]]) -> Run:
    started_at = time.monotonic()
    results = await asyncio.gather(*(_run_lane(lane, commands) for lane, commands in lanes.items()))
    ended = [each for result in results for each in result]
    print(f"All lanes ended after {time.monotonic() - started_at:.0f} s.", flush=True)
    repeated = await _repeat([each for each in ended if each.failures]) if may_repeat(ended) else []
    return Run(ended=ended, repeated=repeated)


def counted(counts: Mapping[str, int]) -> str:
    """The last line of a run."""
    return f"{counts.get('passed', 0)} passed, {counts.get('failed', 0)} failed, {counts.get('skipped', 0)} skipped"
