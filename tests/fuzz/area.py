"""What is common to fuzzing running services: inputs from seeds and corpora, and what holds after each of them.

An area has targets. A target makes an input of random numbers; a feeder gives inputs to services in this process, and
finds out whether they are as they were before. An input that breaks something becomes a file, and so does the command
that repeats it.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

import psutil

from tests.fuzz.files.mutations import damaged_bytes
from tests.support.callbacks import LIMIT_S, Longest, watched_callbacks

#: Share of inputs that are made from those of the corpus.
_FROM_CORPUS = 0.2
#: Inputs between two checks of everything.
_BATCH = 20
#: Time for one input, of the real clock: it ends a hang, and nothing that makes progress comes near it.
_INPUT_TIMEOUT_S = 60.0
#: Times that an input must hold up the event loop to be a finding: the first may have compiled or loaded something.
_TRIES = 3
_MAX_FINDINGS = 10
#: Inputs after which memory is looked at first, and the growth after that which is a leak.
_WARM_UP = 1000
_MAX_BLOCKS_PER_INPUT, _MAX_RSS = 25, 256 << 20


class Complaints(logging.Handler):
    """Errors that any module has logged: input has broken something, where it should have been refused."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the line, with the traceback."""
        fields = getattr(record, "fields", "")
        trace = "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else ""
        self._logged.append(f"{record.getMessage()} {fields} {trace}")

    def require_none(self) -> None:
        """Raises AssertionError with the first error since the last call."""
        logged, self._logged = self._logged, []
        assert not logged, f"an error was logged: {logged[0]}"

    @contextmanager
    def attached(self) -> Iterator[Complaints]:
        """Listens during the block."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield self
        finally:
            root.removeHandler(self)


class Feeder(Protocol):
    """Running services that take inputs."""

    async def feed(self, target: str, data: bytes) -> str:
        """Gives one input to the services. Returns what came of it, in a word. Any exception is a finding."""

    async def check(self) -> None:
        """Returns once the services are as they were before. Any exception is a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Inputs of some kind, and how to start what takes them."""

    name: str
    #: Makes an input, by target.
    targets: Mapping[str, Callable[[Random], bytes]]
    open: Callable[[], AbstractAsyncContextManager[Feeder]]

    @property
    def corpus(self) -> Path:
        """Inputs that have broken something once, or that random numbers hardly find: a directory for each target."""
        return Path(__file__).parent / self.name / "corpus"

    def kept(self, target: str) -> list[Path]:
        """The corpus of a target."""
        return sorted((self.corpus / target).glob("*.bin"))

    def make(self, target: str, seed: int) -> bytes:
        """The input of a seed, which is always the same while code and corpus are."""
        random = Random(f"{self.name} {target} {seed}")
        kept = self.kept(target)
        if kept and random.random() < _FROM_CORPUS:
            return damaged_bytes(random.choice(kept).read_bytes(), random)
        return self.targets[target](random)


@dataclass(slots=True)
class Report:
    """What a run of an area has done."""

    area: str
    first_seed: int
    next_seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line."""
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.outcomes.items()))
        return (
            f"{self.area}: {sum(self.outcomes.values())} runs, seeds {self.first_seed} to {self.next_seed - 1}, "
            f"{len(self.findings)} findings ({outcomes})"
        )


@dataclass(slots=True)
class _Run:
    """One run of an area; `found` is the directory for inputs that break something."""

    area: Area
    report: Report
    found: Path
    longest: Longest
    complaints: Complaints
    fed: list[tuple[str, bytes]] = field(default_factory=list)

    async def batch(self, feeder: Feeder, inputs: Sequence[tuple[str, bytes]]) -> None:
        """Feeds all of them and checks. Raises on the first finding."""
        self.fed = []
        running = running_inputs(self.found, self.area.name)
        shutil.rmtree(running, ignore_errors=True)
        running.mkdir(parents=True)
        for target, data in inputs:
            # Kept before it is fed: it may end this process.
            (running / f"{len(self.fed):03}.{target}.bin").write_bytes(data)
            self.fed.append((target, data))
            self.report.outcomes[await self._feed(feeder, target, data)] += 1
        try:
            async with asyncio.timeout(_INPUT_TIMEOUT_S):
                await feeder.check()
        finally:
            self.complaints.require_none()  # What was logged says more than what the check saw of it.
        shutil.rmtree(running)

    async def _feed(self, feeder: Feeder, target: str, data: bytes) -> str:
        for _ in range(_TRIES):
            self.longest.reset()
            async with asyncio.timeout(_INPUT_TIMEOUT_S):
                outcome = await feeder.feed(target, data)
            self.complaints.require_none()
            if self.longest.seconds <= LIMIT_S:
                return outcome
        raise AssertionError(f"the event loop was held for {self.longest.seconds:.3f} s by {self.longest.callback}")

    def keep(self, error: BaseException) -> None:
        """Keeps the inputs since the last check, the last of which broke something or a check found it."""
        trace = "".join(traceback.format_exception(error))
        name = hashlib.sha256(b"".join(data for _, data in self.fed)).hexdigest()[:12]
        directory = self.found / f"{self.area.name}-{name}"
        directory.mkdir(parents=True, exist_ok=True)
        for number, (target, data) in enumerate(self.fed):
            (directory / f"{number:03}.{target}.bin").write_bytes(data)
        (directory / "traceback.txt").write_text(trace)
        again = f"python -m tests.fuzz --again {self.area.name} {directory}"
        self.report.findings.append(str(directory))
        print(
            f"FOUND by {self.area.name}, in the last of {len(self.fed)} inputs\n{trace}Repeat it: {again}", flush=True
        )


def running_inputs(found: Path, name: str) -> Path:
    """The directory of the inputs since the last check of an area that runs."""
    return found / f"{name}-running"


def fuzz(area: Area, *, first_seed: int, until: float, found: Path, num_seeds: int | None = None) -> Report:
    """Feeds inputs until the time on the monotonic clock, or for so many seeds."""
    report = Report(area.name, first_seed, first_seed)
    last = sys.maxsize if num_seeds is None else first_seed + num_seeds
    while report.next_seed < last and time.monotonic() < until and len(report.findings) < _MAX_FINDINGS:
        asyncio.run(_fuzz(area, report, found, until, last))
    return report


async def _fuzz(area: Area, report: Report, found: Path, until: float, last: int) -> None:
    """Until the time, or the first finding, after which everything starts again."""
    async with area.open() as feeder:
        memory = _Memory()
        with watched_callbacks() as longest, Complaints().attached() as complaints:
            run = _Run(area, report, found, longest, complaints)
            try:
                await run.batch(
                    feeder, [(target, path.read_bytes()) for target in area.targets for path in area.kept(target)]
                )
                while report.next_seed < last and time.monotonic() < until:
                    seeds = range(report.next_seed, min(last, report.next_seed + max(1, _BATCH // len(area.targets))))
                    report.next_seed = seeds.stop
                    await run.batch(
                        feeder, [(target, area.make(target, seed)) for seed in seeds for target in area.targets]
                    )
                    memory.check(sum(report.outcomes.values()))
            except Exception as error:  # noqa: BLE001 - Whatever it is, it is what fuzzing looks for.
                run.keep(error)


def again(area: Area, paths: Sequence[Path]) -> None:
    """Feeds kept inputs in order: files, or directories of them. Raises what they break."""
    files = [file for path in paths for file in (sorted(path.glob("*.bin")) if path.is_dir() else [path])]
    report = Report(area.name, 0, 0)

    async def feed() -> None:
        async with area.open() as feeder:
            with watched_callbacks() as longest, Complaints().attached() as complaints:
                inputs = [(file.name.split(".")[-2], file.read_bytes()) for file in files]
                with tempfile.TemporaryDirectory() as found:
                    await _Run(area, report, Path(found), longest, complaints).batch(feeder, inputs)

    asyncio.run(feed())
    print(report)


class _Memory:
    """Memory of this process, which may not grow with the number of inputs."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._first: tuple[int, int, int] | None = None

    def check(self, num_inputs: int) -> None:
        """Raises AssertionError for a leak."""
        gc.collect()
        blocks, rss = sys.getallocatedblocks(), self._process.memory_info().rss
        if self._first is None:
            if num_inputs >= _WARM_UP:
                self._first = num_inputs, blocks, rss
            return
        inputs, first_blocks, first_rss = num_inputs - self._first[0], self._first[1], self._first[2]
        assert rss - first_rss < _MAX_RSS, f"{inputs} inputs took {rss - first_rss} bytes"
        if inputs >= _WARM_UP:
            per_input = (blocks - first_blocks) / inputs
            assert per_input < _MAX_BLOCKS_PER_INPUT, f"each of {inputs} inputs left {per_input:.0f} blocks of memory"
