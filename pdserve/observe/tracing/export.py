"""Exports spans from a thread of its own, so that no request ever waits for a collector.

Between the event loop and the thread is a bounded queue. Spans that find it full, or that the collector does not take,
are dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pdserve.base.logs import get_logger
from pdserve.observe.tracing.spans import Sampler, SamplingTracer, Span

log = get_logger(__name__)

#: Spans that may wait: those of some hundred requests.
MAX_WAITING = 4096
#: Spans of one message to the collector. Small, because encoding them holds the interpreter's lock: 64 take a few
#: milliseconds, and the event loop gets its turn during each message.
BATCH = 64
#: Time for which spans are collected before they are sent.
DELAY_S = 1.0
#: Time for sending what is left when the process ends.
FLUSH_S = 3.0


class SpanExporter(Protocol):
    """Sends spans to a collector. Used by one thread, apart from `close`."""

    def export(self, spans: Sequence[Span]) -> str | None:
        """Sends spans, for seconds if need be. Returns why they were not taken, or None."""

    def close(self) -> None:
        """Ends an `export` that waits, from any thread."""


class ExportingTracer(SamplingTracer):
    """A tracer with an exporter. Everything but `_run` belongs to the event loop."""

    def __init__(
        self, exporter: SpanExporter, sampler: Sampler, *, gen_ai: bool = False, max_waiting: int = MAX_WAITING
    ) -> None:
        super().__init__(sampler)
        self.gen_ai = gen_ai
        self.exported = 0
        self._exporter = exporter
        self._max_waiting = max_waiting
        self._waiting: deque[Span] = deque()
        #: Written by the event loop, and by the thread.
        self._num_refused, self._num_failed = 0, 0
        self._has_work = threading.Event()
        self._closing = threading.Event()
        #: When the last attempt to send has to start, once the tracer closes.
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """As `Tracer.dropped`."""
        return self._num_refused + self._num_failed

    def emit(self, spans: Sequence[Span]) -> None:
        """As `Tracer.emit`. The spans of one call are queued or dropped together."""
        if len(self._waiting) + len(spans) > self._max_waiting:
            self._num_refused += len(spans)
            return
        self._waiting.extend(spans)
        if not self._has_work.is_set():
            self._has_work.set()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Sends what waits, for at most `timeout_s`, and ends the thread. Blocks: call it from a thread."""
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._has_work.set()
        self._thread.join(timeout_s)
        self._exporter.close()
        if self._thread.is_alive():
            # A daemon: it cannot keep the process from ending, whatever the collector does.
            log.warning("spans_not_flushed", waiting=len(self._waiting), waited_s=timeout_s)

    def _run(self) -> None:
        reason: str | None = None
        while not self._closing.is_set():
            self._has_work.wait()
            self._closing.wait(DELAY_S)
            self._has_work.clear()
            reason = self._export_waiting(reason)
        self._export_waiting(reason)
        self._num_failed += len(self._waiting)

    def _export_waiting(self, last_reason: str | None) -> str | None:
        while self._waiting and time.monotonic() < self._deadline:
            last_reason = self._export_batch(last_reason)
        return last_reason

    def _export_batch(self, last_reason: str | None) -> str | None:
        """Sends one batch. Returns why it failed, and logs when that changes."""
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        reason = self._exporter.export(batch)
        if reason is None:
            self.exported += len(batch)
            if last_reason is not None:
                log.info("span_export_recovered", dropped=self.dropped)
        else:
            self._num_failed += len(batch)
            if last_reason is None:
                log.warning("span_export_failed", reason=reason)
        return reason
