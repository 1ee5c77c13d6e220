"""What a router takes to be queued at a worker, whose reports are old: examples, and any story of two routers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.base.ids import RouterId, WorkerId
from pdserve.base.workers import WorkerLoad, WorkerRecord
from router_svc.routing.local_prefill import LocalPrefillReason, plan_by_load
from router_svc.routing.placement import (
    InFlight,
    Need,
    QueuedPrompt,
    choose_decode,
    choose_prefill,
    incarnation_of,
    queued_tokens,
)
from tests.support.records import ME, worker_record

OTHER = RouterId("other")
PREFILL = WorkerId("prefill-0")


def report(epoch: int = 1, **tokens: int) -> WorkerRecord:
    """A prefill worker's record with these tokens queued, by router."""
    by_router = {RouterId(name): count for name, count in tokens.items()}
    load = WorkerLoad(
        queued_tokens=sum(tokens.values()), queued_by_router=by_router, free_blocks=100, prefill_tokens_per_s=800.0
    )
    return replace(worker_record(PREFILL, epoch=epoch, tier="prefill"), load=load)


IDLE = report()


def test_a_prompt_whose_first_token_came_is_not_queued_whatever_the_report_says() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        prompt.on(IDLE, 600)
        assert queued_tokens(IDLE, in_flight) == queued_tokens(report(me=600), in_flight) == 600
        prompt.computed()
        assert queued_tokens(report(me=600), in_flight) == 0
    assert queued_tokens(report(me=600), in_flight) == 0


def test_back_to_back_prompts_find_the_prefill_tier_idle() -> None:
    in_flight = InFlight(ME)
    need = Need(prompt_tokens=600, sequences=1, overlap={})
    idle_decode = replace(worker_record(), load=WorkerLoad(free_blocks=100, prefill_tokens_per_s=800.0))
    for prefill, reason in ((report(me=600), LocalPrefillReason.SHORT), (report(other=600), LocalPrefillReason.LOAD)):
        here, there = choose_decode([idle_decode], need, in_flight), choose_prefill([prefill], need, in_flight)
        assert here is not None
        assert there is not None
        assert plan_by_load(64, here, there, in_flight).reason is reason


def test_prompts_of_other_routers_count_as_reported() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        prompt.on(IDLE, 100)
        assert queued_tokens(report(me=600, other=300), in_flight) == 400
    assert queued_tokens(report(other=300), InFlight(OTHER)) == 0


def test_of_a_worker_that_does_not_tell_whose_prompts_it_counts_the_larger_number_counts() -> None:
    record = report(me=600)
    old = replace(record, load=replace(record.load, queued_by_router=None))
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        for placed in (600, 900, 200):
            prompt.on(IDLE, placed)
            assert queued_tokens(old, in_flight) == max(600, placed)
        prompt.computed()
    assert queued_tokens(old, in_flight) == 600


def test_what_preempted_sequences_compute_again_counts_for_every_router() -> None:
    record = report(me=600)
    again = replace(record, load=replace(record.load, queued_tokens=650))
    assert queued_tokens(again, InFlight(ME)) == 50


def test_a_prompt_that_was_given_up_counts_until_the_worker_is_known_to_have_dropped_it() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        prompt.on(IDLE, 600)
    assert queued_tokens(report(me=600), in_flight) == 600
    assert queued_tokens(IDLE, in_flight) == 0
    with QueuedPrompt(in_flight) as another:
        another.on(IDLE, 200)
        # One report has both, another neither: nothing counts twice.
        assert [queued_tokens(report(me=tokens), in_flight) for tokens in (800, 600, 0)] == [800, 600, 200]
        another.computed()
    assert queued_tokens(report(me=800), in_flight) == 0


def test_a_prompt_that_moved_on_or_had_all_computed_was_not_given_up() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        prompt.on(IDLE, 600)
        prompt.on(worker_record(), 600)
        prompt.leave()
        prompt.on(IDLE, 600)
        prompt.computed()
        # What tells of progress may come behind the first token.
        prompt.on(IDLE, 0)
    assert queued_tokens(report(me=600), in_flight) == 0


def test_a_prompt_that_the_worker_never_got_was_not_given_up() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        prompt.plan(IDLE, 600)
        assert queued_tokens(IDLE, in_flight) == 600
    with QueuedPrompt(in_flight) as prompt:
        prompt.on(IDLE, 600)
        prompt.plan(worker_record(), 600)
    assert queued_tokens(report(me=600), in_flight) == 0


def test_a_prompt_that_was_sent_before_another_was_given_up_tells_nothing_of_that() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as before, QueuedPrompt(in_flight) as after:
        before.on(IDLE, 100)
        with QueuedPrompt(in_flight) as prompt:
            prompt.on(IDLE, 600)
        after.on(IDLE, 200)
        before.on(IDLE, 50)
        before.computed()
        before.on(IDLE, 0)
        before.computed()
        assert queued_tokens(report(me=800), in_flight) == 800
        after.computed()
        assert queued_tokens(report(me=600), in_flight) == 0


def test_what_was_given_up_on_a_worker_is_forgotten_when_it_is_gone_and_on_no_other() -> None:
    in_flight = InFlight(ME)
    successor = report(epoch=2, me=600)
    for worker in (IDLE, successor):
        with QueuedPrompt(in_flight) as prompt:
            prompt.on(worker, 600)
    in_flight.sweep({incarnation_of(successor)})
    assert queued_tokens(report(me=600), in_flight) == 0
    assert queued_tokens(successor, in_flight) == 600


def test_a_worker_that_died_leaves_nothing_to_its_successor() -> None:
    in_flight = InFlight(ME)
    with QueuedPrompt(in_flight) as prompt:
        prompt.on(IDLE, 600)
    assert queued_tokens(report(epoch=2, me=300), in_flight) == 0


@dataclass(eq=False)
class Sent:
    """A prompt on the worker; `prompt` is None once its router gave it up."""

    router: InFlight
    tokens: int
    prompt: QueuedPrompt | None
    #: Number of the step of the story in which it was sent.
    at: int


class Reports(RuleBasedStateMachine):
    """A worker computes the prompts of two routers in order; its reports reach either of them late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = {name: InFlight(name) for name in (ME, OTHER)}
        self.queue: list[Sent] = []
        self.reports = [IDLE]
        self.seen = dict.fromkeys(self.routers, 0)
        #: When the last prompt was given up of which no later one has been computed.
        self.given_up: dict[RouterId, int | None] = dict.fromkeys(self.routers)
        self.epoch = 1
        self.now = 0

    def queued(self) -> Counter[RouterId]:
        return sum((Counter({sent.router.router_id: sent.tokens}) for sent in self.queue), Counter())

    @rule(name=st.sampled_from([ME, OTHER]), tokens=st.integers(1, 900))
    def send(self, name: RouterId, tokens: int) -> None:
        prompt = QueuedPrompt(self.routers[name])
        prompt.on(report(self.epoch), tokens)
        self.now += 1
        self.queue.append(Sent(self.routers[name], tokens, prompt, self.now))

    @precondition(lambda self: self.queue)
    @rule(tokens=st.integers(1, 900))
    def compute(self, tokens: int) -> None:
        """A step; its progress or its first token is told at once."""
        first = self.queue[0]
        first.tokens -= min(tokens, first.tokens)
        if not first.tokens:
            del self.queue[0]
        if first.prompt is not None and first.tokens:
            first.prompt.on(report(self.epoch), first.tokens)
        elif first.prompt is not None:
            first.prompt.computed()
            given_up = self.given_up[first.router.router_id]
            if given_up is not None and given_up < first.at:
                self.given_up[first.router.router_id] = None

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), at_once=st.booleans())
    def give_up(self, data: st.DataObject, at_once: bool) -> None:
        """A client leaves, and the worker drops the prompt now or later."""
        sent = data.draw(st.sampled_from(self.queue))
        if sent.prompt is not None:
            sent.prompt.__exit__(None, None, None)
            sent.prompt = None
            self.now += 1
            self.given_up[sent.router.router_id] = self.now
        if at_once:
            self.queue.remove(sent)

    @rule()
    def die(self) -> None:
        """All sagas see their calls break; a successor takes the worker's name."""
        for sent in list(self.queue):
            if sent.prompt is not None:
                sent.prompt.__exit__(None, None, None)
        self.queue.clear()
        self.given_up = dict.fromkeys(self.given_up)
        self.epoch += 1
        self.make_report()
        self.seen = dict.fromkeys(self.seen, len(self.reports) - 1)

    @rule()
    def make_report(self) -> None:
        self.reports.append(report(self.epoch, **self.queued()))

    @rule(name=st.sampled_from([ME, OTHER]), data=st.data())
    def read_report(self, name: RouterId, data: st.DataObject) -> None:
        """Not always the newest, never one that is older than the last."""
        self.seen[name] = data.draw(st.integers(self.seen[name], len(self.reports) - 1))

    @invariant()
    def each_router_is_right_about_its_own_and_goes_by_the_report_for_the_others(self) -> None:
        for name, router in self.routers.items():
            record = self.reports[self.seen[name]]
            waited_for = sum(s.tokens for s in self.queue if s.router is router and s.prompt is not None)
            reported = Counter(record.load.queued_by_router or {})
            ours = queued_tokens(record, router) - (reported.total() - reported[name])
            if self.given_up[name] is not None:
                assert ours == max(waited_for, reported[name])
            else:
                assert ours == waited_for


TestReports = Reports.TestCase
TestReports.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
