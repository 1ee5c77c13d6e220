"""Any order of commands and steps on a tiny pool: references add up, all requests advance, tokens are a lone run's."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.pace import Pace
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import Grant, StepEvents
from tests.support.depth import IS_FULL
from tests.unit.engine.fakes import BLOCK_SIZE, EOS, KEY, VOCAB, expected, limits
from tests.unit.engine.grouped import WINDOWS, GroupedLateWorker, Windows, write_tables
from tests.unit.engine.late import WatchedPool

NUM_BLOCKS = 7
CAPACITY = NUM_BLOCKS * BLOCK_SIZE
#: Bounds of a lone run: a sequence that fills the pool ends with one token more.
BOUNDS: SequenceLimits = limits(CAPACITY + 1)

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2, 3]),
    max_tokens=st.integers(1, 20),
    min_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.2]),
    allowed_token_ids=st.sampled_from([(), (), (), tuple(range(3, VOCAB))]),
    bad_words=st.sampled_from([(), (), (), ((13, 14), (9, 10, 11), (20,))]),
)
#: Few different prompts of many lengths, so that prefixes are shared.
prompts = st.builds(
    lambda start, length: [(start + index) % VOCAB for index in range(length)],
    st.integers(8, 9),
    st.integers(1, CAPACITY - 1),
)


class DecodeMachine(RuleBasedStateMachine):
    #: Windows of the KV groups.
    windows: Windows = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = NUM_BLOCKS * len(self.windows)
        pool = WatchedPool(self.num_blocks, BLOCK_SIZE, self.windows)
        config = DecodeSchedulerConfig(limits=limits(), max_num_seqs=3, max_num_batched_tokens=7, itl_budget_s=0.01)
        self.scheduler = DecodeScheduler(pool, config)
        self.worker = GroupedLateWorker(pool=pool, scheduler=self.scheduler, check=self.scheduler.check_integrity)
        self.jobs: dict[RequestId, DecodeJob] = {}
        self.granted: dict[RequestId, Grant] = {}
        #: Index of the first token that is reported of each choice: 1 when the client has the first tokens already.
        self.starts_at: dict[RequestId, int] = {}
        self.stopped: set[tuple[RequestId, int]] = set()
        self.over: set[RequestId] = set()
        self.lone_runs: dict[tuple[RequestId, int], list[int]] = {}

    def open(self) -> list[RequestId]:
        return [request_id for request_id in self.jobs if request_id not in self.over]

    def lone_run(self, request_id: RequestId, choice: int) -> list[int]:
        if (request_id, choice) not in self.lone_runs:
            job = self.jobs[request_id]
            self.lone_runs[request_id, choice] = expected(job.prompt_token_ids, job.params, choice, BOUNDS)
        return self.lone_runs[request_id, choice]

    def first_tokens(self, request_id: RequestId) -> list[int]:
        return [self.lone_run(request_id, choice)[0] for choice in range(self.jobs[request_id].params.n)]

    @rule(
        prompt=prompts,
        sampling=params,
        threshold=st.sampled_from([0, 0, 6, 99]),
        best_effort=st.sampled_from([False, False, True]),
    )
    def reserve(self, prompt: list[int], sampling: SamplingParams, threshold: int, best_effort: bool) -> None:
        request_id = RequestId(f"r{len(self.jobs):02}")
        job = DecodeJob(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=sampling,
            hash_key=KEY,
            local_prefill_threshold=threshold,
            is_best_effort=best_effort,
        )
        self.scheduler.reserve(job)
        self.jobs[request_id] = job
        self.starts_at[request_id] = 0

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def transfer_arrives(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.granted)))
        grant, job = self.granted.pop(request_id), self.jobs[request_id]
        write_tables(self.worker.cache, grant.block_tables, grant.first_missing, job.prompt_token_ids)
        self.scheduler.activate(request_id, self.first_tokens(request_id))
        self.starts_at[request_id] = 1

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), forced=st.booleans())
    def transfer_fails(self, data: st.DataObject, forced: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.granted)))
        self.prefill_locally(request_id, forced)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), forced=st.booleans())
    def prefill_anything_locally(self, data: st.DataObject, forced: bool) -> None:
        """Also in phases that do not allow it: then nothing may change."""
        request_id = data.draw(st.sampled_from(sorted(self.jobs)))
        before = self.scheduler.load()
        try:
            self.prefill_locally(request_id, forced)
        except InvalidTransition:
            assert self.scheduler.load() == before

    @precondition(lambda self: set(self.jobs) - set(self.granted))
    @rule(data=st.data())
    def activate_what_waits_for_no_transfer(self, data: st.DataObject) -> None:
        """No phase but RESERVED allows it."""
        request_id = data.draw(st.sampled_from(sorted(set(self.jobs) - set(self.granted))))
        before = self.scheduler.load()
        with pytest.raises(InvalidTransition):
            self.scheduler.activate(request_id, self.first_tokens(request_id))
        assert self.scheduler.load() == before

    def certainly_here(self) -> list[RequestId]:
        """Requests that no command can have ended: such an end is reported by the next step only."""
        stopped = {request_id for request_id, _ in self.stopped}
        return [each for each in self.open() if each not in stopped and self.starts_at[each] == 0]

    @precondition(lambda self: self.certainly_here())
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        """A request id that is here already is refused."""
        request_id = data.draw(st.sampled_from(self.certainly_here()))
        before = self.scheduler.load()
        with pytest.raises(InvalidTransition):
            self.scheduler.reserve(self.jobs[request_id])
        assert self.scheduler.load() == before

    def prefill_locally(self, request_id: RequestId, forced: bool) -> None:
        self.scheduler.prefill_locally(request_id, self.first_tokens(request_id) if forced else ())
        self.granted.pop(request_id, None)
        self.starts_at[request_id] = int(forced)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.jobs)))
        assert not (self.scheduler.abort(request_id) and request_id in self.over)
        assert not self.scheduler.abort(request_id)
        self.granted.pop(request_id, None)
        self.over.add(request_id)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def stop_choice(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.open()))
        choice = data.draw(st.integers(0, self.jobs[request_id].params.n - 1))
        self.scheduler.stop_choice(request_id, choice)
        self.stopped.add((request_id, choice))

    @rule(token_s=st.sampled_from([0.0005, 0.002, 0.1]), row_s=st.sampled_from([0.001, 0.004, 0.1]))
    def another_pace(self, token_s: float, row_s: float) -> None:
        """Chunks alongside decoding sequences become 7, 5 or 4 tokens, and there is time for 7, 1 or no rows."""
        self.worker.pace = Pace(decode_step_s=0.0, decode_rows=0.0, decode_row_s=row_s, prefill_token_s=token_s)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_work():
                self.take_step()

    @precondition(lambda self: self.scheduler.has_work())
    @rule()
    def step_of_aborted_requests(self) -> None:
        """The requests of a step are aborted while it is computed, so that it ends early."""
        events, request_ids = self.worker.interrupted_step()
        assert not events.tokens
        self.take_in(events)
        for request_id in request_ids:
            assert self.scheduler.abort(request_id)
            self.over.add(request_id)

    @rule(max_steps=st.integers(2, 12))
    def step_ahead(self, max_steps: int) -> None:
        if self.scheduler.has_work():
            self.run_ahead(max_steps)

    def run_ahead(self, max_steps: int) -> None:
        for events in self.worker.run_ahead(max_steps):
            self.take_in(events)

    def take_step(self) -> None:
        self.take_in(self.worker.step())

    def take_in(self, events: StepEvents) -> None:
        self.scheduler.check_integrity()
        for grant in events.grants:
            assert grant.request_id not in self.over
            for table, first in zip(grant.block_tables, grant.first_missing, strict=True):
                assert first >= grant.num_cached_blocks, "a block that is cached would be written"
                assert all(self.worker.pool.ref_count(block) == 1 for block in table[first:])
            self.granted[grant.request_id] = grant
        for request_id, _ in events.finished:
            assert request_id not in self.over, "finished twice"
            self.over.add(request_id)
            self.check_complete(request_id)
        assert not events.failures

    def check_complete(self, request_id: RequestId) -> None:
        job = self.jobs[request_id]
        for choice in range(job.params.n):
            if (request_id, choice) not in self.stopped:
                whole = self.lone_run(request_id, choice)
                assert self.worker.tokens(request_id, choice) == whole[self.starts_at[request_id] :]
                messages = self.worker.reported.get(request_id, {}).get(choice, [])
                assert all(message.finish_reason is None for message in messages[:-1])
                assert not messages or messages[-1].finish_reason is not None

    @invariant()
    def references_are_those_of_the_requests(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def tokens_queued_for_routers_are_within_the_total(self) -> None:
        load = self.scheduler.load()
        assert sum(load.queued_by_router.values()) <= load.queued_prompt_tokens
        assert all(tokens > 0 for tokens in load.queued_by_router.values())

    @invariant()
    def reserved_blocks_are_among_those_that_are_not_free(self) -> None:
        load = self.scheduler.load()
        assert 0 <= load.reserved_blocks <= load.total_blocks - load.free_blocks
        assert (load.reserved_blocks > 0) == (load.num_held > 0)
        assert load.num_waiting or not load.waiting_blocks

    @invariant()
    def reported_tokens_are_the_head_of_a_lone_run(self) -> None:
        for request_id, choices in self.worker.reported.items():
            job = self.jobs[request_id]
            for choice, messages in choices.items():
                whole = self.lone_run(request_id, choice)
                start = messages[0].first_index
                assert start == self.starts_at[request_id]
                tokens = self.worker.tokens(request_id, choice)
                assert tokens == whole[start : start + len(tokens)]
                assert EOS not in tokens[:-1] or job.params.ignore_eos

    def teardown(self) -> None:
        """No request starves: if their transfers arrive, all of them end."""
        for _ in range(2000):
            if not self.scheduler.has_work() and not self.granted:
                break
            if self.scheduler.has_work():
                self.run_ahead(5)
            for request_id in sorted(self.granted):
                grant, job = self.granted.pop(request_id), self.jobs[request_id]
                write_tables(self.worker.cache, grant.block_tables, grant.first_missing, job.prompt_token_ids)
                self.scheduler.activate(request_id, self.first_tokens(request_id))
                self.starts_at[request_id] = 1
        assert self.open() == []
        assert self.worker.pool.num_free == self.num_blocks
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_held, load.queued_prompt_tokens) == (0, 0, 0, 0)
        assert (load.reserved_blocks, load.waiting_blocks) == (0, 0)


class TwoGroupsMachine(DecodeMachine):
    """With a KV layout of a full and a windowed group."""

    windows = WINDOWS


TestDecodeScheduler = DecodeMachine.TestCase
TestDecodeScheduler.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)

TestTwoGroups = TwoGroupsMachine.TestCase
TestTwoGroups.settings = settings(max_examples=200 if IS_FULL else 30, stateful_step_count=25, deadline=None)
