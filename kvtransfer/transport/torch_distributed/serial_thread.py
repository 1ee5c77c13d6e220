"""A thread that does jobs one after the other, and lets the process exit although a job is stuck in a library."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class SerialThread:
    """Jobs are done in the order in which they were submitted. They do not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # An executor's threads are waited for when the interpreter exits.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Before `close` only: what comes later is never done."""
        self._jobs.put(job)

    def close(self) -> None:
        """The thread ends when it has done all jobs."""
        self._jobs.put(None)

    def join(self) -> None:
        """After `close`: blocks until all jobs are done."""
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # What it holds is free while the thread waits for the next one.
