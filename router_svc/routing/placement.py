"""Which worker gets a request: the one with the least work before it, given what each has cached. Pure policy.

Costs are in prompt tokens. The tokens a worker need not compute (or receive) are weighed against the work queued there.
Prompts of other routers count as the worker reports them, this router's own as `in_flight` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.ids import WorkerId
from pdserve.peers.workers import WorkerRecord
from router_svc.routing.in_flight import InFlight
from router_svc.routing.incarnation import Incarnation, incarnation_of

#: Cost of one running sequence in prompt tokens. A decode worker with this many fewer uncached tokens may run one
#: sequence more and still be the better choice.
SEQUENCE_TOKENS = 64
#: Share of its blocks that a worker keeps free when a request moves to it because another one is full.
_SPARE_SHARE = 0.1
#: Blocks that it keeps free for each of its sequences: with less than two for each, a worker asks a request to leave.
_SPARE_EACH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A request to be placed. `excluded` are workers that have already failed it."""

    prompt_tokens: int
    sequences: int
    #: Leading blocks of the prompt that each worker has cached.
    overlap: Mapping[WorkerId, int]
    excluded: Collection[Incarnation] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The chosen worker, and why it was chosen."""

    worker: WorkerRecord
    prompt_tokens: int
    #: Prompt tokens this worker has cached, according to the index.
    expected_cached_tokens: int
    cost_tokens: int
    why: str
    #: Every candidate is full.
    is_full: bool = False

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens the worker would have to compute."""
        return self.prompt_tokens - self.expected_cached_tokens

    @property
    def incarnation(self) -> Incarnation:
        """The worker as an entry of `Demand.excluded`."""
        return incarnation_of(self.worker)


def choose_decode(workers: Sequence[WorkerRecord], demand: Demand, in_flight: InFlight) -> Placement | None:
    """The decode worker that can start soonest; a full one only when all are full. None without a candidate."""
    return _cheapest(workers, demand, lambda worker: _decode_cost(worker, demand, in_flight))


def choose_prefill(workers: Sequence[WorkerRecord], demand: Demand, in_flight: InFlight) -> Placement | None:
    """The prefill worker that has the fewest tokens to compute until this prompt is done. None without a candidate."""
    return _cheapest(workers, demand, lambda worker: _prefill_cost(worker, demand, in_flight))


def has_spare_blocks(worker: WorkerRecord, demand: Demand, in_flight: InFlight) -> bool:
    """Whether enough of the worker's blocks stay free when it also holds the demand, so that nothing has to leave it.

    Sequences that this router has placed there, and that it does not report yet, count like those of the demand.
    """
    blocks = (-(-demand.prompt_tokens // worker.layout.block_size) + demand.sequences) * len(worker.layout.groups)
    reported = worker.load.running + worker.load.waiting
    coming = demand.sequences + max(0, in_flight.sequences(worker.worker_id) - reported)
    spare = worker.load.free_blocks - blocks * coming // max(1, demand.sequences)
    return spare >= max(_SPARE_SHARE * worker.total_blocks, _SPARE_EACH * (reported + coming))


def queued_tokens(worker: WorkerRecord, in_flight: InFlight) -> int:
    """Prompt tokens that the worker computes first: other routers' as reported, this router's as counted here.

    For a worker that does not report whose prompts it counts, the larger of its report and this router's count.
    """
    load = worker.load
    if load.queued_by_router is None:
        return max(load.queued_tokens, in_flight.prompt_tokens(worker.worker_id))
    reported = load.queued_by_router.get(in_flight.router_id, 0)
    return load.queued_tokens - reported + in_flight.own_queued_tokens(worker, reported)


def num_sequences(worker: WorkerRecord, in_flight: InFlight) -> int:
    """Sequences that a decode worker runs or is about to run."""
    return max(worker.load.running + worker.load.waiting, in_flight.sequences(worker.worker_id))


@dataclass(frozen=True, slots=True, order=True)
class _Cost:
    """Compared field by field; the id makes the choice deterministic."""

    is_full: bool
    tokens: int
    worker_id: WorkerId

    def __str__(self) -> str:
        return f"{self.tokens} (full)" if self.is_full else str(self.tokens)


def _decode_cost(worker: WorkerRecord, demand: Demand, in_flight: InFlight) -> _Cost:
    sequences = num_sequences(worker, in_flight)
    blocks = demand.prompt_tokens // worker.layout.block_size + 1 - demand.overlap.get(worker.worker_id, 0)
    num_blocks = blocks * len(worker.layout.groups)
    is_full = sequences + demand.sequences > worker.max_num_seqs or num_blocks > worker.load.free_blocks
    tokens = uncached_tokens(worker, demand) + queued_tokens(worker, in_flight) + SEQUENCE_TOKENS * sequences
    return _Cost(is_full, tokens, worker.worker_id)


def _prefill_cost(worker: WorkerRecord, demand: Demand, in_flight: InFlight) -> _Cost:
    return _Cost(False, uncached_tokens(worker, demand) + queued_tokens(worker, in_flight), worker.worker_id)


def _cached(worker: WorkerRecord, demand: Demand) -> int:
    # The last token is always computed, even when it is cached: its output is the first token's distribution.
    return min(demand.overlap.get(worker.worker_id, 0) * worker.layout.block_size, demand.prompt_tokens - 1)


def uncached_tokens(worker: WorkerRecord, demand: Demand) -> int:
    """Prompt tokens that the worker would compute."""
    return demand.prompt_tokens - _cached(worker, demand)


def _cheapest(
    workers: Sequence[WorkerRecord], demand: Demand, cost_of: Callable[[WorkerRecord], _Cost]
) -> Placement | None:
    candidates = [worker for worker in workers if worker.ready and incarnation_of(worker) not in demand.excluded]
    ranked = sorted(((cost_of(worker), worker) for worker in candidates), key=lambda pair: pair[0])
    if not ranked:
        return None
    cost, worker = ranked[0]
    cached = _cached(worker, demand)
    why = f"{cached} of {demand.prompt_tokens} tokens cached, cost {cost}"
    if len(ranked) > 1:
        why += f"; next best {ranked[1][1].worker_id} costs {ranked[1][0]}"
    else:
        why += "; the only candidate"
    return Placement(
        worker=worker,
        prompt_tokens=demand.prompt_tokens,
        expected_cached_tokens=cached,
        cost_tokens=cost.tokens,
        why=why,
        is_full=cost.is_full,
    )
