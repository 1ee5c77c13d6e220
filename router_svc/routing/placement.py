"""Which worker gets a request: the least work in its way, counting what it has cached. Pure policy.

Costs are in prompt tokens, so that what a worker need not compute (or receive) weighs against what it has to do first.
A worker's report is up to two seconds old, and says whose prompts it counts. So a router takes the prompts of other
routers from the report, and for its own goes by what it has placed itself and not yet seen done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

from pdserve.base.ids import Epoch, RouterId, WorkerId
from pdserve.base.workers import WorkerRecord

#: What one running sequence weighs against prompt tokens: a decode worker with this many uncached tokens less may be
#: one sequence fuller and still be the better choice.
SEQUENCE_TOKENS = 64


#: A restarted worker is another one.
Incarnation = tuple[WorkerId, Epoch]


def incarnation_of(worker: WorkerRecord) -> Incarnation:
    """The worker as something that ends with its process."""
    return (worker.worker_id, worker.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What has to be placed. `excluded` are workers that already failed this request."""

    prompt_tokens: int
    sequences: int
    #: Leading blocks each worker has cached.
    overlap: Mapping[WorkerId, int]
    excluded: Collection[Incarnation] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The chosen worker and why."""

    worker: WorkerRecord
    prompt_tokens: int
    #: Prompt tokens the index says this worker has.
    expected_cached_tokens: int
    cost_tokens: int
    why: str

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens it would have to compute."""
        return self.prompt_tokens - self.expected_cached_tokens

    @property
    def incarnation(self) -> Incarnation:
        """The worker as something to exclude."""
        return incarnation_of(self.worker)


class InFlight:
    """What this router has placed on workers and not yet seen done."""

    def __init__(self, router_id: RouterId) -> None:
        #: By this name workers report our prompts.
        self.router_id = router_id
        self._sequences: dict[WorkerId, int] = {}
        self._prompt_tokens: dict[WorkerId, int] = {}
        #: Prompts that were given up, anywhere: tells what was sent before one of them from what was sent after it.
        self.num_given_up = 0
        #: Workers that may compute prompts of ours that nobody waits for any more, with the number of the last one.
        self._doubtful: dict[Incarnation, int] = {}

    def sequences(self, worker: WorkerId) -> int:
        """Sequences placed on a decode worker."""
        return self._sequences.get(worker, 0)

    def prompt_tokens(self, worker: WorkerId) -> int:
        """Uncached prompt tokens placed on a worker of either tier."""
        return self._prompt_tokens.get(worker, 0)

    def queued_tokens(self, worker: WorkerRecord, reported: int) -> int:
        """Prompt tokens of this router that the worker has to compute.

        What it reports of them counts only where a prompt was given up: nobody tells when the worker has dropped it.
        """
        ours = self.prompt_tokens(worker.worker_id)
        return max(ours, reported) if incarnation_of(worker) in self._doubtful else ours

    def computed(self, worker: Incarnation, num_given_up: int) -> None:
        """The worker has computed a prompt that was sent when so many were given up: by now it has dropped those."""
        if self._doubtful.get(worker, num_given_up) <= num_given_up:
            self._doubtful.pop(worker, None)

    def gave_up(self, worker: Incarnation) -> None:
        """A prompt was sent to the worker and ended without a first token: it failed, or the client left."""
        self.num_given_up += 1
        self._doubtful[worker] = self.num_given_up

    def sweep(self, current: Collection[Incarnation]) -> None:
        """Forgets what was given up on other workers than these."""
        for worker in self._doubtful.keys() - current:
            del self._doubtful[worker]

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


class QueuedPrompt:
    """One prompt's uncached tokens, counted on the worker that is to compute them, wherever that is at the moment.

    As a context manager, it is counted nowhere after the block; given up, if it was sent and not computed.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._counted = ExitStack()
        #: Who has got it, and how many prompts had been given up by then.
        self._sent: tuple[Incarnation, int] | None = None
        #: Of those it has to compute; 0 when only the first token itself is missing.
        self._missing = 0

    def plan(self, worker: WorkerRecord, prompt_tokens: int) -> None:
        """So many of them will be in this worker's way, and in no other's: it has not got the prompt yet."""
        self.leave()
        self._count(worker, prompt_tokens)

    def on(self, worker: WorkerRecord, prompt_tokens: int) -> None:
        """Now so many of them are in this worker's way, and in no other's: it is sent the prompt, or has it."""
        incarnation = incarnation_of(worker)
        if self._sent is None or self._sent[0] != incarnation:
            self._sent = (incarnation, self._in_flight.num_given_up)
        self._count(worker, prompt_tokens)
        self._missing = prompt_tokens

    def leave(self) -> None:
        """Nobody knows by whom they will be computed."""
        self._count(None, 0)
        self._sent = None
        self._missing = 0

    def computed(self) -> None:
        """The first token is there."""
        if self._sent is not None:
            self._in_flight.computed(*self._sent)
        self._count(None, 0)
        self._missing = 0

    def _count(self, worker: WorkerRecord | None, prompt_tokens: int) -> None:
        self._counted.close()
        if worker is not None and prompt_tokens:
            self._counted.enter_context(self._in_flight.prefilling(worker.worker_id, prompt_tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sent is not None and self._missing:
            self._in_flight.gave_up(self._sent[0])
        self.leave()


@contextmanager
def _counted(counts: dict[WorkerId, int], worker: WorkerId, amount: int) -> Iterator[None]:
    counts[worker] = counts.get(worker, 0) + amount
    try:
        yield
    finally:
        counts[worker] -= amount
        if not counts[worker]:
            del counts[worker]


def choose_decode(workers: Sequence[WorkerRecord], need: Need, in_flight: InFlight) -> Placement | None:
    """The decode worker that can start soonest; one without room only when none has any. None: no candidate."""
    return _cheapest(workers, need, lambda worker: _decode_cost(worker, need, in_flight))


def choose_prefill(workers: Sequence[WorkerRecord], need: Need, in_flight: InFlight) -> Placement | None:
    """The prefill worker with the fewest tokens to compute before this prompt is done. None: no candidate."""
    return _cheapest(workers, need, lambda worker: _prefill_cost(worker, need, in_flight))


def queued_tokens(worker: WorkerRecord, in_flight: InFlight) -> int:
    """Prompt tokens the worker has to compute first: those of other routers as reported, and ours as we know them.

    Of a worker that does not tell whose they are, the larger of its report and of ours.
    """
    load = worker.load
    if load.queued_by_router is None:
        return max(load.queued_tokens, in_flight.prompt_tokens(worker.worker_id))
    reported = load.queued_by_router.get(in_flight.router_id, 0)
    return load.queued_tokens - reported + in_flight.queued_tokens(worker, reported)


def num_sequences(worker: WorkerRecord, in_flight: InFlight) -> int:
    """Sequences that decode, or will, on a decode worker."""
    return max(worker.load.running + worker.load.waiting, in_flight.sequences(worker.worker_id))


@dataclass(frozen=True, slots=True, order=True)
class _Cost:
    """Compared field by field; the id makes the choice repeatable."""

    is_full: bool
    tokens: int
    worker_id: WorkerId


def _decode_cost(worker: WorkerRecord, need: Need, in_flight: InFlight) -> _Cost:
    sequences = num_sequences(worker, in_flight)
    blocks = need.prompt_tokens // worker.layout.block_size + 1 - need.overlap.get(worker.worker_id, 0)
    is_full = sequences + need.sequences > worker.max_num_seqs or blocks > worker.load.free_blocks
    tokens = _uncached(worker, need) + queued_tokens(worker, in_flight) + SEQUENCE_TOKENS * sequences
    return _Cost(is_full, tokens, worker.worker_id)


def _prefill_cost(worker: WorkerRecord, need: Need, in_flight: InFlight) -> _Cost:
    return _Cost(False, _uncached(worker, need) + queued_tokens(worker, in_flight), worker.worker_id)


def _cached(worker: WorkerRecord, need: Need) -> int:
    # The last token is always computed, whatever is cached.
    return min(need.overlap.get(worker.worker_id, 0) * worker.layout.block_size, need.prompt_tokens - 1)


def _uncached(worker: WorkerRecord, need: Need) -> int:
    return need.prompt_tokens - _cached(worker, need)


def _cheapest(
    workers: Sequence[WorkerRecord], need: Need, cost_of: Callable[[WorkerRecord], _Cost]
) -> Placement | None:
    candidates = [
        worker for worker in workers if worker.ready and (worker.worker_id, worker.epoch) not in need.excluded
    ]
    ranked = sorted(((cost_of(worker), worker) for worker in candidates), key=lambda pair: pair[0])
    if not ranked:
        return None
    cost, worker = ranked[0]
    cached = _cached(worker, need)
    why = f"{cached} of {need.prompt_tokens} tokens cached, cost {_shown(cost)}"
    if len(ranked) > 1:
        why += f"; next best {ranked[1][1].worker_id} costs {_shown(ranked[1][0])}"
    else:
        why += "; the only candidate"
    return Placement(
        worker=worker,
        prompt_tokens=need.prompt_tokens,
        expected_cached_tokens=cached,
        cost_tokens=cost.tokens,
        why=why,
    )


def _shown(cost: _Cost) -> str:
    return f"{cost.tokens} (full)" if cost.is_full else str(cost.tokens)
