"""A decode worker's scheduler as a model: requests that wait, hold blocks for a transfer, run, and leave.

The scheduler, its block pool and its queues are the product's own. Around them, each request arrives once, its blocks
arrive or its lease ends, and its client may leave at any time. Steps happen only while the scheduler has work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from decode_svc.request import DecodeJob, DecodeMove, DecodePhase, ScheduledRequest
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import Grant, StepPlan
from tests.model_check.search import Broken

_BLOCK_SIZE = 2
_LIMITS = SequenceLimits(max_model_len=32, vocab_size=64, eos_token_ids=frozenset({1}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request: the same first tokens as all others, so that they share what is cached."""

    prompt: int
    max_tokens: int
    n: int = 1
    #: Tokens that it brings from another worker, whose blocks are sent; 0: it is new.
    output: int = 0
    threshold: int = 0

    def named(self, name: str) -> DecodeJob:
        """As the scheduler gets it."""
        return DecodeJob(
            request_id=RequestId(name),
            prompt_token_ids=tuple(range(10, 10 + self.prompt)),
            params=SamplingParams(max_tokens=self.max_tokens, n=self.n),
            hash_key=bytes(32),
            local_prefill_threshold=self.threshold,
            output={choice: tuple(range(30, 30 + self.output)) for choice in range(self.n) if self.output},
            is_moving=self.output > 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The requests and the worker, and how often what may happen or not happens at most."""

    jobs: tuple[Job, ...]
    num_blocks: int = 4
    max_reserved_share: float = 0.5
    aborts: int = 1
    stops: int = 0
    failures: int = 0


@dataclass(frozen=True)
class _State:
    scheduler: DecodeScheduler
    #: Requests that have not come yet.
    coming: tuple[int, ...]
    #: Blocks that a transfer may write to, by request.
    receiving: dict[RequestId, frozenset[int]]


class ReservationWorld:
    """A state of the model. Implements `tests.model_check.search.World`."""

    def __init__(self, bounds: Bounds) -> None:
        self.left = bounds
        pool = BlockPool(bounds.num_blocks, _BLOCK_SIZE)
        config = DecodeSchedulerConfig(
            limits=_LIMITS, max_num_seqs=4, max_num_batched_tokens=4, max_reserved_share=bounds.max_reserved_share
        )
        self.state = _State(DecodeScheduler(pool, config), tuple(range(len(bounds.jobs))), {})
        self._bytes = b""

    def key(self) -> Hashable:
        state, number = self.state, dict[int, int]()
        pool, scheduler = state.scheduler._blocks.pool, state.scheduler
        requests = tuple(_request_key(each, number) for each in scheduler._requests.values())
        cached = tuple((pool._hash_of[block], number.setdefault(block, len(number))) for block in pool._cached)
        held = [(index, pool._refs[block], pool._hash_of[block]) for block, index in number.items()]
        running = tuple(
            tuple(s.id for s in queue) for queue in (scheduler._running._active, scheduler._running._preempted)
        )
        reservations = scheduler._reservations
        counted = tuple(reservations._needed.items()), tuple(reservations._missing.items()), reservations._num_missing
        flags = scheduler._must_rescan_waiting, bool(scheduler._events), tuple(scheduler._events.finished)
        receiving = tuple(state.receiving)
        return requests, cached, tuple(held), running, counted, flags, receiving, state.coming, _spent(self.left)

    @property
    def is_final(self) -> bool:
        scheduler = self.state.scheduler
        is_over = not scheduler._requests and not scheduler.has_work()
        return is_over and scheduler._blocks.pool.num_free == scheduler._blocks.pool.num_blocks

    def successors(self) -> Iterator[tuple[str, bool, ReservationWorld]]:
        self._bytes = pickle.dumps(self.state, pickle.HIGHEST_PROTOCOL)
        for name, is_fair, act in self._actions():
            after = ReservationWorld.__new__(ReservationWorld)
            after.left, after.state, after._bytes = self.left, pickle.loads(self._bytes), b""
            try:
                act(after)
                after._check()
            except (AssertionError, InvalidTransition) as error:
                raise Broken(f"{name}: {str(error).partition(chr(10))[0]}") from error
            except Broken as error:
                raise Broken(f"{name}: {error}") from error
            yield name, is_fair, after

    # What can happen.
    def _actions(self) -> Iterator[tuple[str, bool, Callable[[ReservationWorld], None]]]:
        state, left = self.state, self.left
        if state.scheduler.has_work():
            yield "step", True, lambda world: world._step()
            if left.failures:
                yield "failing-step", False, lambda world: world._fail()
        for index in state.coming:
            yield f"arrive {index}", False, lambda world, index=index: world._arrive(index)
        for name in state.receiving:
            yield f"commit {name}", True, lambda world, name=name: world._commit(name)
            yield f"lease-ends {name}", True, lambda world, name=name: world._lease_ends(name)
        for name, request in state.scheduler._requests.items():
            if left.aborts:
                yield f"abort {name}", False, lambda world, name=name: world._abort(name)
            if left.stops:
                for choice in range(request.job.params.n):
                    yield (
                        f"stop {name} {choice}",
                        False,
                        lambda world, name=name, choice=choice: world._stop(name, choice),
                    )
            if request.phase is DecodePhase.WAITING and not request.locally and request.allows(DecodeMove.COMPUTE):
                yield f"compute {name}", False, lambda world, name=name: world.state.scheduler.prefill_locally(name)

    def _arrive(self, index: int) -> None:
        coming = tuple(each for each in self.state.coming if each != index)
        self.state = replace(self.state, coming=coming)
        self.state.scheduler.reserve(self.left.jobs[index].named(f"r{index}"))

    def _step(self, *, fails: bool = False) -> None:
        scheduler = self.state.scheduler
        plan = scheduler.schedule(Pace())
        self._require_own_blocks(plan)
        rows, _ = plan.sample_rows()
        sampled: list[SampleResult] = [Sampled(token_id=30 + row.position) for row in rows]
        if fails:
            sampled[:1] = [SampleFailure(reason="it fails") for _ in sampled[:1]]
        for grant in scheduler.update(plan, sampled).grants:
            self.state.receiving[grant.request_id] = _missing(grant)

    def _fail(self) -> None:
        self.left = replace(self.left, failures=self.left.failures - 1)
        self._step(fails=True)

    def _commit(self, name: RequestId) -> None:
        request = self.state.scheduler._requests[name]
        del self.state.receiving[name]
        self.state.scheduler.activate(name, [30] * request.job.params.n)

    def _lease_ends(self, name: RequestId) -> None:
        """Nothing writes to the blocks any more: the worker computes the prompt, or the session ends."""
        request = self.state.scheduler._requests[name]
        del self.state.receiving[name]
        if request.allows(DecodeMove.COMPUTE):
            self.state.scheduler.prefill_locally(name)
        else:
            self.state.scheduler.abort(name)

    def _abort(self, name: RequestId) -> None:
        self.left = replace(self.left, aborts=self.left.aborts - 1)
        self.state.receiving.pop(name, None)
        self.state.scheduler.abort(name)

    def _stop(self, name: RequestId, choice: int) -> None:
        self.left = replace(self.left, stops=self.left.stops - 1)
        self.state.scheduler.stop_choice(name, choice)

    # What must hold.
    def _check(self) -> None:
        scheduler, pool = self.state.scheduler, self.state.scheduler._blocks.pool
        scheduler.check_integrity()
        waiting = {name for name, each in scheduler._requests.items() if each.phase is DecodePhase.RESERVED}
        if waiting != set(self.state.receiving):
            raise Broken(f"{waiting} are reserved, and transfers run for {set(self.state.receiving)}")
        for name, blocks in self.state.receiving.items():
            table = set(scheduler._requests[name].prompt_sequence.block_table)
            if not blocks <= table or any(pool.ref_count(block) != 1 or pool._hash_of[block] for block in blocks):
                raise Broken(f"a transfer for {name} writes to blocks that it does not own alone")

    def _require_own_blocks(self, plan: StepPlan) -> None:
        """A step writes to no block that a transfer or another sequence may write to."""
        pool, received = self.state.scheduler._blocks.pool, set().union(*self.state.receiving.values())
        written: dict[int, str] = {}
        for sequence, start, stop in _written(plan):
            for slot in range(start, stop):
                block = sequence.block_table[slot // _BLOCK_SIZE]
                if block in received or written.setdefault(block, sequence.id) != sequence.id:
                    raise Broken(f"{sequence.id} writes to a block of another request")
                if pool.ref_count(block) != 1:
                    raise Broken(f"{sequence.id} writes to a block that is shared")


def _written(plan: StepPlan) -> Iterator[tuple[Sequence, int, int]]:
    for sequence in plan.decoding:
        yield sequence, sequence.num_computed, sequence.num_tokens
    for chunk in plan.chunks:
        yield chunk.sequence, chunk.start, chunk.stop


def _missing(grant: Grant) -> frozenset[int]:
    pairs = zip(grant.block_tables, grant.first_missing, strict=True)
    return frozenset(block for table, first in pairs for block in table[first:])


def _spent(bounds: Bounds) -> tuple[int, int, int]:
    return bounds.aborts, bounds.stops, bounds.failures


def _request_key(request: ScheduledRequest, number: dict[int, int]) -> Hashable:
    """Blocks are numbered in the order in which they are seen: which ones they are makes no difference."""
    sequences = {id(each): each for each in (request.prompt_sequence, *request.sequences.values())}
    return (
        request.request_id,
        request.phase,
        request.locally,
        request.forced_first_tokens,
        frozenset(request.stopped),
        tuple(request.sequences),
        tuple(
            (
                each.choice_index,
                each.num_tokens,
                each.num_computed,
                each.num_slots,
                each.num_registered,
                tuple(number.setdefault(block, len(number)) for block in each.block_table),
            )
            for each in sequences.values()
        ),
    )
