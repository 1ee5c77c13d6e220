"""Requests whose results are no longer wanted: a step that computes only such requests ends early. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kernels.decoder import Interrupt
from pdserve.base.ids import RequestId
from pdserve.engine.step import StepPlan


class EndedRequests:
    """Requests that a call to the step thread is about to end, and the interrupt of the step that computes them.

    Without it, that call would wait for a step of which nothing is used: seconds, if it has a long chunk of a prompt.
    """

    def __init__(self, interrupt: Interrupt | None) -> None:
        """`interrupt`: that of the step's forward pass; None: steps run to their end."""
        self._interrupt = interrupt
        self._lock = threading.Lock()
        self._request_ids: set[RequestId] = set()
        #: The plan of the step that is computed.
        self._plan: StepPlan | None = None

    def add(self, request_id: RequestId) -> None:
        """A call will end the request. Ends the present step if that is true of all its requests.

        While a worker changes its role, it may have the request twice: then a step of the other one is computed again.
        """
        with self._lock:
            self._request_ids.add(request_id)
            self._interrupt_if_unwanted()

    def discard(self, request_id: RequestId) -> None:
        """The request has ended, and another one may have its id."""
        with self._lock:
            self._request_ids.discard(request_id)

    @contextmanager
    def computing(self, plan: StepPlan) -> Iterator[None]:
        """The step that is computed in the block can end with `PassInterrupted`."""
        if self._interrupt is None:
            yield
            return
        with self._lock:
            self._interrupt.clear()
            self._plan = plan
            if self._request_ids:
                self._interrupt_if_unwanted()
        try:
            yield
        finally:
            with self._lock:
                self._plan = None

    def _interrupt_if_unwanted(self) -> None:
        if self._interrupt is None or self._plan is None:
            return
        sequences = self._plan.scheduled()
        if sequences and all(sequence.request_id in self._request_ids for sequence in sequences):
            self._interrupt.set()
