"""Any order of adding, releasing and stepping on a tiny pool: nothing leaks, no prompt starves, KV is right."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler
from tests.support.depth import IS_FULL
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, VOCAB, expected, limits
from tests.unit.engine.grouped import WINDOWS, GroupedWorker, Windows, require_stored

NUM_BLOCKS = 6

prompts = st.builds(
    lambda start, length: [(start + index) % VOCAB for index in range(length)],
    st.integers(8, 9),
    st.integers(1, NUM_BLOCKS * BLOCK_SIZE),
)


class PrefillMachine(RuleBasedStateMachine):
    #: Windows of the KV groups.
    windows: Windows = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = NUM_BLOCKS * len(self.windows)
        pool = BlockPool(self.num_blocks, BLOCK_SIZE, self.windows)
        self.scheduler = PrefillScheduler(
            pool, PrefillSchedulerConfig(limits=limits(), max_num_batched_tokens=5, max_scored_tokens=3)
        )
        self.worker = GroupedWorker(pool=pool, scheduler=self.scheduler)
        self.jobs: dict[RequestId, PrefillJob] = {}
        self.computed: set[RequestId] = set()
        self.stopped: set[RequestId] = set()
        self.num_computed: dict[RequestId, int] = {}
        #: Tokens of scored prompts with log-probabilities so far.
        self.scores: dict[RequestId, int] = {}

    def open(self) -> list[RequestId]:
        return [request_id for request_id in self.num_computed if request_id not in self.computed | self.stopped]

    @rule(prompt=prompts)
    def add_scored(self, prompt: list[int]) -> None:
        request_id = RequestId(f"r{len(self.jobs):02}")
        params = SamplingParams(temperature=0.0, logprobs=1)
        self.jobs[request_id] = PrefillJob(
            request_id=request_id, prompt_token_ids=prompt, params=params, hash_key=KEY, is_scored=True
        )
        self.scheduler.add(self.jobs[request_id])
        self.num_computed[request_id] = 0
        self.scores[request_id] = 0

    @rule(
        prompt=prompts,
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        forced=st.booleans(),
        best_effort=st.booleans(),
    )
    def add(self, prompt: list[int], n: int, temperature: float, forced: bool, best_effort: bool) -> None:
        request_id = RequestId(f"r{len(self.jobs):02}")
        self.jobs[request_id] = PrefillJob(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=temperature, n=n, seed=5),
            hash_key=KEY,
            forced_first_tokens=tuple(range(n)) if forced else (),
            is_best_effort=best_effort,
        )
        self.scheduler.add(self.jobs[request_id])
        self.num_computed[request_id] = 0

    @precondition(lambda self: self.num_computed)
    @rule(data=st.data())
    def release_in_any_phase(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.num_computed))))

    @precondition(lambda self: self.num_computed)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        """A request id that is here already is refused, in every phase."""
        request_id = data.draw(st.sampled_from(sorted(self.num_computed)))
        before = self.scheduler.load()
        with pytest.raises(InvalidTransition):
            self.scheduler.add(self.jobs[request_id])
        assert self.scheduler.load() == before

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def release_computed(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.computed))))

    @precondition(lambda self: self.num_computed)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """A stopped prompt keeps its blocks, and has no part in any later step."""
        request_id = data.draw(st.sampled_from(sorted(self.num_computed)))
        tables = self.scheduler.block_tables(request_id)
        for _ in range(2):
            assert self.scheduler.stop(request_id)
        assert self.scheduler.block_tables(request_id) == tables
        self.computed.discard(request_id)
        self.stopped.add(request_id)

    def release(self, request_id: RequestId) -> None:
        assert self.scheduler.release(request_id)
        assert not self.scheduler.release(request_id)
        self.computed.discard(request_id)
        self.stopped.discard(request_id)
        del self.num_computed[request_id]

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_work():
                self.take_step()

    @precondition(lambda self: self.scheduler.has_work())
    @rule()
    def step_of_released_prompts(self) -> None:
        """The prompts of a step are released while it is computed, so that it ends early."""
        events, request_ids = self.worker.interrupted_step()
        assert not events.progress
        assert not events.tokens
        for request_id in request_ids:
            self.release(request_id)

    def take_step(self) -> None:
        events = self.worker.step()
        assert sum(chunk.stop - chunk.start for chunk in self.worker.plans[-1].chunks) <= 5
        for started in events.started:
            assert self.num_computed[started.request_id] == 0
            assert started.num_cached < len(self.jobs[started.request_id].prompt_token_ids)
        assert sum(len(chunk.scores) for chunk in self.worker.plans[-1].chunks) <= 3
        for scores in events.scores:
            assert scores.first == self.scores[scores.request_id] + 1
            self.scores[scores.request_id] += len(scores.logprobs)
        for progress in events.progress:
            assert progress.request_id not in self.stopped
            assert progress.num_computed > self.num_computed[progress.request_id]
            self.num_computed[progress.request_id] = progress.num_computed
            if progress.request_id in self.scores:
                assert self.scores[progress.request_id] == min(progress.num_computed, progress.num_prompt - 1)
                if progress.num_computed == progress.num_prompt:
                    self.computed.add(progress.request_id)
        for tokens in events.tokens:
            assert tokens.request_id not in self.scores
            job = self.jobs[tokens.request_id]
            reported = [choice.token_ids[0] for choice in tokens.choices]
            lone = [expected(job.prompt_token_ids, job.params, c, limits())[0] for c in range(job.params.n)]
            assert reported == (list(job.forced_first_tokens) or lone)
            assert tokens.request_id not in self.computed | self.stopped
            self.computed.add(tokens.request_id)

    @invariant()
    def references_are_those_of_the_jobs(self) -> None:
        self.scheduler.check_integrity()

    @invariant()
    def computed_tokens_can_be_sent(self) -> None:
        for request_id, count in self.num_computed.items():
            if count:
                assert self.scheduler.num_computed(request_id) == count
                tables, prompt = self.scheduler.block_tables(request_id), self.jobs[request_id].prompt_token_ids
                require_stored(self.worker.cache, tables, count, prompt)

    def teardown(self) -> None:
        """No prompt starves: if computed prompts are released, all are computed."""
        for request_id in sorted(self.stopped):
            self.release(request_id)
        for _ in range(1000):
            if not self.open() and not self.computed:
                break
            if self.scheduler.has_work():
                self.take_step()
            for request_id in sorted(self.computed):
                self.release(request_id)
        assert self.open() == []
        assert self.worker.pool.num_free == self.num_blocks
        self.scheduler.check_integrity()


class TwoGroupsMachine(PrefillMachine):
    """With a KV layout of a full and a windowed group."""

    windows = WINDOWS


TestPrefillScheduler = PrefillMachine.TestCase
TestPrefillScheduler.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

TestTwoGroups = TwoGroupsMachine.TestCase
TestTwoGroups.settings = settings(max_examples=200 if IS_FULL else 10, stateful_step_count=25, deadline=None)
