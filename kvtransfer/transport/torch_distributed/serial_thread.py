"""A thread that runs jobs one after the other, and lets the process exit although a job is stuck in a library."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class SerialThread:
    """Runs jobs in the order in which they were submitted. Jobs must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Not an executor: the interpreter waits for its threads at exit.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job. A job submitted after `close` is never run."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after all jobs."""
        self._jobs.put(None)

    def join(self) -> None:
        """Waits for all jobs, after `close`."""
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # Frees what it holds while the thread waits for the next one.
