"""What the machine does while tests run: moments in which it stood still, and how many processes wait for a core."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_INTERVAL_S = 0.1
#: A thread that wakes up later than this stood still, whatever the other threads do.
_STALL_S = 0.5
_PRESSURE = Path("/proc/pressure/cpu")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which this process did not run although it was due. Unix seconds."""

    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What the machine did between two moments."""

    longest_stall_s: float
    stalled_s: float
    #: Share of the time in which a process waited for a core; None where the kernel does not count it.
    cpu_pressure: float | None

    def __str__(self) -> str:
        pressure = "unknown" if self.cpu_pressure is None else f"{self.cpu_pressure:.0%}"
        return f"stalls {self.stalled_s:.1f} s (longest {self.longest_stall_s:.1f} s), CPU pressure {pressure}"


@dataclass(slots=True)
class MachineWatch:
    """Stalls, and the kernel's count of the time in which processes waited for a core."""

    stalls: list[Stall] = field(default_factory=list)
    #: Unix time, and seconds with a waiting process since the machine started.
    pressure: list[tuple[float, float]] = field(default_factory=list)

    def between(self, started_at: float, ended_at: float) -> Meanwhile:
        """What happened from `started_at` to `ended_at` (Unix seconds)."""
        lengths = [
            min(stall.ended_at, ended_at) - max(stall.started_at, started_at)
            for stall in self.stalls
            if stall.ended_at > started_at and stall.started_at < ended_at
        ]
        return Meanwhile(max(lengths, default=0.0), sum(lengths), _growth(self.pressure, started_at, ended_at))

    def sample(self, before: float, now: float) -> None:
        """The watch slept from `before` until `now` (Unix seconds), and notes what it finds."""
        if now - before - _INTERVAL_S > _STALL_S:
            self.stalls.append(Stall(before + _INTERVAL_S, now))
        if not self.pressure or now - self.pressure[-1][0] >= 1.0:
            waited_s = _waited_s()
            if waited_s is not None:
                self.pressure.append((now, waited_s))


@contextmanager
def watching() -> Iterator[MachineWatch]:
    """Watches from a thread until the block ends. For processes that run no tests themselves."""
    watch, is_over = MachineWatch(), threading.Event()
    # The offset to Unix time is fixed: a clock that is set is no stall.
    offset = time.time() - time.monotonic()

    def run() -> None:
        before = time.monotonic()
        while not is_over.wait(_INTERVAL_S):
            now = time.monotonic()
            watch.sample(before + offset, now + offset)
            before = now

    thread = threading.Thread(target=run, name="machine-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        thread.join()


def processor() -> str:
    """Kind and number of the processors: one model name can stand for several generations."""
    fields: dict[str, str] = {}
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    name = fields.get("model name", "unknown processor")
    kind = f" (family {fields['cpu family']} model {fields['model']})" if "cpu family" in fields else ""
    return f"{name}{kind}, {len(os.sched_getaffinity(0))} cores"


def _waited_s() -> float | None:
    try:
        first = _PRESSURE.read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return None
    return int(first.rpartition("total=")[2]) / 1e6


def _growth(samples: Sequence[tuple[float, float]], started_at: float, ended_at: float) -> float | None:
    """Growth of a counter per second over the shortest sampled time that contains both moments."""
    before = [sample for sample in samples if sample[0] <= started_at][-1:] or list(samples[:1])
    after = [sample for sample in samples if sample[0] >= ended_at][:1] or list(samples[-1:])
    if not before or after[0][0] <= before[0][0]:
        return None
    return (after[0][1] - before[0][1]) / (after[0][0] - before[0][0])
