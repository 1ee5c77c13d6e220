"""The work this router has placed on workers and not yet seen done. Pure.

A worker's report is up to two seconds old. For its own prompts a router therefore trusts its own count, not the report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pdserve.base.ids import RouterId, WorkerId
from pdserve.peers.workers import WorkerRecord
from router_svc.routing.incarnation import Incarnation, incarnation_of


class InFlight:
    """Sequences and uncached prompt tokens per worker.

    A prompt that was given up (its worker failed, or the client left) is special: the worker may still compute it for
    a while, and it reports nothing when it drops it. Until then the worker's own report counts, too:

        send A ---- give up A ---- send B -------- first token of B
                    |<-- max(our count, report) -->|<-- our count

    Workers drop cancelled prompts before they start later ones. The first token of a prompt sent after the give-up
    therefore proves that the earlier one is gone.
    """

    def __init__(self, router_id: RouterId) -> None:
        #: The name under which workers report this router's prompts.
        self.router_id = router_id
        self._sequences: dict[WorkerId, int] = {}
        self._prompt_tokens: dict[WorkerId, int] = {}
        #: Prompts given up so far on any worker: orders give-ups and sends.
        self.num_given_up = 0
        #: Workers that may still compute a prompt that was given up, with the number of the latest such prompt.
        self._may_compute_given_up: dict[Incarnation, int] = {}

    def sequences(self, worker: WorkerId) -> int:
        """Sequences placed on a decode worker."""
        return self._sequences.get(worker, 0)

    def prompt_tokens(self, worker: WorkerId) -> int:
        """Uncached prompt tokens placed on a worker of either tier."""
        return self._prompt_tokens.get(worker, 0)

    def own_queued_tokens(self, worker: WorkerRecord, reported: int) -> int:
        """Prompt tokens of this router that the worker still has to compute.

        `reported` is the worker's own number. It counts only while the worker may compute a prompt that was given up.
        """
        ours = self.prompt_tokens(worker.worker_id)
        return max(ours, reported) if incarnation_of(worker) in self._may_compute_given_up else ours

    def mark_computed(self, worker: Incarnation, num_given_up: int) -> None:
        """The worker has computed a prompt that was sent after `num_given_up` give-ups, and has dropped those."""
        if self._may_compute_given_up.get(worker, num_given_up) <= num_given_up:
            self._may_compute_given_up.pop(worker, None)

    def give_up(self, worker: Incarnation) -> None:
        """A prompt that the worker received has ended without a first token."""
        self.num_given_up += 1
        self._may_compute_given_up[worker] = self.num_given_up

    def sweep(self, current: Collection[Incarnation]) -> None:
        """Forgets the prompts given up on workers that are gone, which are all but `current`."""
        for worker in self._may_compute_given_up.keys() - current:
            del self._may_compute_given_up[worker]

    @contextmanager
    def decoding(self, worker: WorkerId, sequences: int) -> Iterator[None]:
        """Counts sequences on a decode worker during the block."""
        with _counted(self._sequences, worker, sequences):
            yield

    @contextmanager
    def prefilling(self, worker: WorkerId, prompt_tokens: int) -> Iterator[None]:
        """Counts prompt tokens on a worker during the block."""
        with _counted(self._prompt_tokens, worker, prompt_tokens):
            yield


@dataclass(slots=True, eq=False, kw_only=True)
class _Assignment:
    """One worker that computes, or is expected to compute, a prompt."""

    worker: Incarnation
    is_sent: bool
    #: Prompts given up anywhere when this one was sent.
    num_given_up: int
    #: Prompt tokens the worker still has to compute; 0 when only the first token itself is missing.
    remaining: int


class QueuedPrompt:
    """The uncached tokens of one prompt, counted on at most one worker at a time."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._counted = ExitStack()
        self._assignment: _Assignment | None = None

    @contextmanager
    def assigned(self, worker: WorkerRecord, tokens: int, *, is_sent: bool = True) -> Iterator[None]:
        """Counts `tokens` on the worker until they are computed, the block ends, or another assignment replaces this.

        With `is_sent` false the worker has not received the prompt yet. A block that ends with tokens remaining gives
        the prompt up on a worker that received it.
        """
        incarnation = incarnation_of(worker)
        previous, num_given_up = self._assignment, self._in_flight.num_given_up
        if previous is not None and previous.is_sent and previous.worker == incarnation:
            num_given_up = previous.num_given_up
        assignment = self._assignment = _Assignment(
            worker=incarnation,
            is_sent=is_sent,
            num_given_up=num_given_up,
            remaining=tokens,
        )
        self._count(assignment)
        try:
            yield
        finally:
            if self._assignment is assignment:
                if assignment.is_sent and assignment.remaining:
                    self._in_flight.give_up(incarnation)
                self.unassign()

    def update(self, tokens: int) -> None:
        """The assigned worker has this many tokens left to compute."""
        if self._assignment is not None:
            self._assignment.remaining = tokens
            self._count(self._assignment)

    def unassign(self) -> None:
        """Counts the prompt nowhere: it is not decided yet which worker computes it."""
        self._assignment = None
        self._counted.close()

    def mark_computed(self) -> None:
        """The first token has arrived."""
        if self._assignment is None:
            return
        if self._assignment.is_sent:
            self._in_flight.mark_computed(self._assignment.worker, self._assignment.num_given_up)
        self.update(0)

    def _count(self, assignment: _Assignment) -> None:
        self._counted.close()
        if assignment.remaining:
            self._counted.enter_context(self._in_flight.prefilling(assignment.worker[0], assignment.remaining))


@contextmanager
def _counted(counts: dict[WorkerId, int], worker: WorkerId, amount: int) -> Iterator[None]:
    counts[worker] = counts.get(worker, 0) + amount
    try:
        yield
    finally:
        counts[worker] -= amount
        if not counts[worker]:
            del counts[worker]
