"""Queued work of the simulated GPU: streams, events and graphs, with the interfaces of `torch.cuda`.

Work is executed as late or as early as on a GPU, so code that forgets to wait reads garbage. Where streams and events
leave a choice, a seeded generator decides what comes next.

Source: NVIDIA, CUDA C++ Programming Guide, "Asynchronous Concurrent Execution".
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from weakref import WeakSet

import torch

#: One operation of a stream.
Work = Callable[[], None]


class Mark:
    """A position in a stream's work, and whether it has been reached."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reached_at: float | None = None

    @property
    def reached(self) -> bool:
        return self.reached_at is not None

    def reach(self) -> None:
        self.reached_at = time.monotonic()


class _Wait:
    """The stream continues when a mark of another one has been reached."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


class _Sleep:
    """Work behind it is not executed before something waits for it."""


_Item = Work | Mark | _Wait | _Sleep


class Gpu:
    """All queued work. One for the process, under one lock, since speed does not matter here."""

    def __init__(self, *, eagerness: float, seed: float) -> None:
        """`eagerness`: share of the work executed before anything waits for it, from 0 (none) to 1 (nearly all)."""
        self.lock = threading.RLock()
        self._eagerness = eagerness
        self._random = random.Random(seed)
        self._busy: list[Stream] = []
        self._is_working = False
        self._here = threading.local()
        self.default = Stream(gpu=self)
        #: Whether hidden waits of the host raise.
        self.refuses_hidden_waits = False
        #: Number of launches of kernels, allocations, and waits of the host.
        self.counts: Counter[str] = Counter()

    @property
    def stream(self) -> Stream:
        """The current stream of the calling thread."""
        stream: Stream = getattr(self._here, "stream", self.default)
        return stream

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._here.stream = stream

    def submit(self, work: Work, stream: Stream | None = None) -> None:
        """Queues work, or records it while the stream is captured."""
        with self.lock:
            (stream or self.stream).add(work)
            # An item that frees memory submits work while it is executed.
            while not self._is_working and self._random.random() < self._eagerness:
                awake = [each for each in self._busy if not isinstance(each.queue[0], _Sleep)]
                if not awake:
                    break
                self._advance(self._random.choice(awake))

    def note_busy(self, stream: Stream) -> None:
        if stream not in self._busy:
            self._busy.append(stream)

    def finish(self, mark: Mark) -> None:
        """Executes what the mark needs to be reached, and perhaps more."""
        self.counts["waits"] += 1
        with self.lock:
            self.refuse_in_capture("waiting for the device")
            self._reach(mark)

    def finish_for(self, what: object) -> None:
        """Executes what the calling thread has launched, for an operation that waits for it implicitly."""
        if self.refuses_hidden_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.finish(self.stream.mark())

    def finish_all(self) -> None:
        with self.lock:
            self.refuse_in_capture("waiting for the device")
            for stream in list(self._busy):
                self._reach(stream.mark())

    def refuse_in_capture(self, what: str) -> None:
        """Raises `RuntimeError` if the calling thread is capturing."""
        if self.stream.recording is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def _reach(self, mark: Mark) -> None:
        while not mark.reached:
            blocked = self._advance(mark.stream)
            if blocked is not None:
                self._reach(blocked)

    def _advance(self, stream: Stream) -> Mark | None:
        """Executes the next item of a stream, or returns the mark that must be reached first."""
        item = stream.queue[0]
        if isinstance(item, _Wait) and not item.mark.reached:
            return item.mark
        stream.queue.popleft()
        if not stream.queue:
            self._busy.remove(stream)
        if isinstance(item, Mark):
            item.reach()
        elif not isinstance(item, _Wait | _Sleep):
            # Tensors of a forward pass may only be written to in this mode.
            self._is_working = True
            try:
                with torch.inference_mode():
                    item()
            finally:
                self._is_working = False
        return None


_gpu: list[Gpu] = []


def gpu() -> Gpu:
    """The simulated GPU of this process."""
    return _gpu[0]


def start(*, eagerness: float = 0.3, seed: float = 0) -> Gpu:
    """Replaces the previous one, whose work must be done."""
    _gpu[:] = [Gpu(eagerness=eagerness, seed=seed)]
    return gpu()


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, device: object = None, priority: int = 0, *, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        self.queue: deque[_Item] = deque()
        #: Captured work, and work that overwrites the memory allocated during the capture.
        self.recording: list[Work] | None = None
        self.overwrites: list[Work] = []

    @property
    def gpu(self) -> Gpu:
        return self._gpu or gpu()

    def add(self, item: _Item) -> None:
        if self.recording is not None:
            if isinstance(item, Mark):
                raise RuntimeError("the simulated GPU captures one stream, without events")
            if isinstance(item, _Wait):
                raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
            assert not isinstance(item, _Sleep)
            self.recording.append(item)
            return
        self.queue.append(item)
        self.gpu.note_busy(self)

    def mark(self) -> Mark:
        mark = Mark(self)
        with self.gpu.lock:
            if self.queue or self.recording is not None:
                self.add(mark)
            else:
                mark.reach()
        return mark

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with self.gpu.lock:
            if event.mark is not None and not event.mark.reached:
                self.add(_Wait(event.mark))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.gpu.finish(self.mark())

    def query(self) -> bool:
        return not self.queue


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or gpu().stream).mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or gpu().stream).wait_event(self)

    def synchronize(self) -> None:
        if self.mark is not None:
            gpu().finish(self.mark)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, without meaning."""
        marks = [event.mark for event in (self, end)]
        times = [mark.reached_at for mark in marks if mark is not None and mark.reached_at is not None]
        if len(times) < 2:
            raise RuntimeError("Both events must be recorded and completed before calculating elapsed time.")
        return 1e3 * (times[1] - times[0]) + 1e-3


class InStream:
    """As `torch.cuda.stream`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = gpu().stream
        gpu().stream = self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gpu().stream = self._before


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        #: Work that overwrites its allocations.
        self.overwrites: list[Work] = []
        self._pool = (0, id(self))
        #: Graphs that share its pool, in which each may overwrite results of the others.
        self._together: list[Graph] = [self]

    def pool(self) -> tuple[int, int]:
        return self._pool

    def share(self, pool: object) -> None:
        other = next((graph for graph in _graphs if graph._pool == pool), None)
        if other is not None:
            self._pool, self._together = other._pool, other._together
            self._together.append(self)

    def replay(self) -> None:
        for graph in self._together:
            for overwrite in graph.overwrites if graph is not self else ():
                gpu().submit(overwrite)
        for work in self.works:
            gpu().submit(work)


_graphs: WeakSet[Graph] = WeakSet()


class Capture:
    """As `torch.cuda.graph`: the work of one stream is recorded instead of executed."""

    def __init__(self, graph: Graph, pool: object = None, stream: Stream | None = None, **_: object) -> None:
        self._graph = graph
        _graphs.add(graph)
        graph.share(pool)
        self._inside = InStream(stream or Stream())

    def __enter__(self) -> None:
        gpu().finish_all()
        self._inside.__enter__()
        gpu().stream.recording = []
        gpu().stream.overwrites = self._graph.overwrites

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stream = gpu().stream
        self._graph.works, stream.recording = stream.recording or [], None
        self._inside.__exit__(kind, error, trace)


def sleep(cycles: int) -> None:
    """As `torch.cuda._sleep`: lasts until something waits for the stream."""
    with gpu().lock:
        gpu().stream.add(_Sleep())


def synchronize(device: torch.device | int | None = None) -> None:
    """As `torch.cuda.synchronize`."""
    gpu().finish_all()
