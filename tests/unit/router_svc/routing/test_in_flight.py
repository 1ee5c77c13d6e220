"""How many prompt tokens a router counts as queued at a worker, given that the worker's reports are late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.base.ids import RouterId, WorkerId
from pdserve.peers.workers import WorkerLoad, WorkerRecord
from router_svc.routing.in_flight import InFlight, QueuedPrompt
from router_svc.routing.incarnation import incarnation_of
from router_svc.routing.local_prefill import LocalPrefillReason, plan_by_load
from router_svc.routing.placement import Demand, choose_decode, choose_prefill, queued_tokens
from tests.support.records import ME, worker_record

OTHER = RouterId("other")
PREFILL = WorkerId("prefill-0")


def report(epoch: int = 1, **tokens: int) -> WorkerRecord:
    """The record of a prefill worker with these tokens queued, by router."""
    by_router = {RouterId(name): count for name, count in tokens.items()}
    load = WorkerLoad(
        queued_tokens=sum(tokens.values()), queued_by_router=by_router, free_blocks=100, prefill_tokens_per_s=800.0
    )
    return replace(worker_record(PREFILL, epoch=epoch, tier="prefill"), load=load)


IDLE = report()


@contextmanager
def sent(in_flight: InFlight, tokens: int, worker: WorkerRecord = IDLE) -> Iterator[QueuedPrompt]:
    """A prompt that was sent to a worker."""
    prompt = QueuedPrompt(in_flight)
    with prompt.assigned(worker, tokens):
        yield prompt


def test_a_prompt_with_a_first_token_is_not_queued_whatever_the_report_says() -> None:
    in_flight = InFlight(ME)
    with sent(in_flight, 600) as prompt:
        assert queued_tokens(IDLE, in_flight) == queued_tokens(report(me=600), in_flight) == 600
        prompt.mark_computed()
        assert queued_tokens(report(me=600), in_flight) == 0
    assert queued_tokens(report(me=600), in_flight) == 0


def test_back_to_back_prompts_find_the_prefill_tier_idle() -> None:
    in_flight = InFlight(ME)
    demand = Demand(prompt_tokens=600, sequences=1, overlap={})
    idle_decode = replace(worker_record(), load=WorkerLoad(free_blocks=100, prefill_tokens_per_s=800.0))
    for prefill, reason in ((report(me=600), LocalPrefillReason.SHORT), (report(other=600), LocalPrefillReason.LOAD)):
        here, there = choose_decode([idle_decode], demand, in_flight), choose_prefill([prefill], demand, in_flight)
        assert here is not None
        assert there is not None
        assert plan_by_load(64, here, there, in_flight).reason is reason


def test_prompts_of_other_routers_count_as_reported() -> None:
    in_flight = InFlight(ME)
    with sent(in_flight, 100):
        assert queued_tokens(report(me=600, other=300), in_flight) == 400
    assert queued_tokens(report(other=300), InFlight(OTHER)) == 0


def test_if_a_worker_does_not_report_by_router_the_larger_of_both_numbers_counts() -> None:
    record = report(me=600)
    old = replace(record, load=replace(record.load, queued_by_router=None))
    in_flight = InFlight(ME)
    with sent(in_flight, 600) as prompt:
        for remaining in (600, 900, 200):
            prompt.update(remaining)
            assert queued_tokens(old, in_flight) == max(600, remaining)
        prompt.mark_computed()
    assert queued_tokens(old, in_flight) == 600


def test_tokens_that_preempted_sequences_recompute_count_for_every_router() -> None:
    record = report(me=600)
    recomputing = replace(record, load=replace(record.load, queued_tokens=650))
    assert queued_tokens(recomputing, InFlight(ME)) == 50


def test_a_prompt_that_was_given_up_counts_until_the_worker_is_known_to_have_dropped_it() -> None:
    in_flight = InFlight(ME)
    with sent(in_flight, 600):
        pass
    assert queued_tokens(report(me=600), in_flight) == 600
    assert queued_tokens(IDLE, in_flight) == 0
    with sent(in_flight, 200) as later:
        # One report includes both prompts, another neither: nothing counts twice.
        assert [queued_tokens(report(me=tokens), in_flight) for tokens in (800, 600, 0)] == [800, 600, 200]
        later.mark_computed()
    assert queued_tokens(report(me=800), in_flight) == 0


def test_a_prompt_that_was_reassigned_or_computed_was_not_given_up() -> None:
    in_flight = InFlight(ME)
    prompt = QueuedPrompt(in_flight)
    with prompt.assigned(IDLE, 600), prompt.assigned(worker_record(), 600):
        prompt.unassign()
        with prompt.assigned(IDLE, 600):
            prompt.mark_computed()
            # A progress report may arrive after the first token.
            prompt.update(0)
    assert queued_tokens(report(me=600), in_flight) == 0


def test_a_prompt_that_the_worker_never_received_was_not_given_up() -> None:
    in_flight = InFlight(ME)
    prompt = QueuedPrompt(in_flight)
    with prompt.assigned(IDLE, 600, is_sent=False):
        assert queued_tokens(IDLE, in_flight) == 600
    with prompt.assigned(IDLE, 600), prompt.assigned(worker_record(), 600, is_sent=False):
        pass
    assert queued_tokens(report(me=600), in_flight) == 0


def test_a_prompt_is_counted_on_one_worker_at_a_time() -> None:
    in_flight, decode, prefill = InFlight(ME), worker_record(), IDLE
    prompt = QueuedPrompt(in_flight)

    def counted() -> tuple[int, int]:
        return in_flight.prompt_tokens(decode.worker_id), in_flight.prompt_tokens(prefill.worker_id)

    with prompt.assigned(decode, 100, is_sent=False):
        assert counted() == (100, 0)
        with prompt.assigned(prefill, 100):
            assert counted() == (0, 100)
            prompt.update(30)
            assert counted() == (0, 30)
            prompt.update(0)
            assert counted() == (0, 0)
            prompt.unassign()
            with prompt.assigned(decode, 5):
                assert counted() == (5, 0)
    assert counted() == (0, 0)


def test_a_prompt_that_was_sent_before_another_was_given_up_proves_nothing_about_that_one() -> None:
    in_flight = InFlight(ME)
    with sent(in_flight, 100) as before:
        with sent(in_flight, 600):
            pass
        with sent(in_flight, 200) as after:
            before.update(50)
            before.mark_computed()
            before.update(0)
            before.mark_computed()
            assert queued_tokens(report(me=800), in_flight) == 800
            after.mark_computed()
            assert queued_tokens(report(me=600), in_flight) == 0


def test_an_assignment_to_the_same_worker_does_not_make_a_prompt_younger() -> None:
    in_flight = InFlight(ME)
    with sent(in_flight, 100) as prompt:
        with sent(in_flight, 600):
            pass
        with prompt.assigned(IDLE, 100):
            prompt.mark_computed()
    assert queued_tokens(report(me=600), in_flight) == 600


def test_prompts_given_up_on_a_worker_are_forgotten_when_that_worker_is_gone() -> None:
    in_flight = InFlight(ME)
    successor = report(epoch=2, me=600)
    for worker in (IDLE, successor):
        with sent(in_flight, 600, worker):
            pass
    in_flight.sweep({incarnation_of(successor)})
    assert queued_tokens(report(me=600), in_flight) == 0
    assert queued_tokens(successor, in_flight) == 600


def test_a_worker_that_died_leaves_nothing_to_its_successor() -> None:
    in_flight = InFlight(ME)
    with sent(in_flight, 600):
        pass
    assert queued_tokens(report(epoch=2, me=300), in_flight) == 0


@dataclass(eq=False)
class Sent:
    """A prompt on the worker."""

    router: InFlight
    tokens: int
    #: None once its router has given it up.
    prompt: QueuedPrompt | None
    #: Logical time at which it was sent.
    at: int
    assigned: ExitStack = field(default_factory=ExitStack)

    def give_up(self) -> None:
        self.assigned.close()
        self.prompt = None


class Reports(RuleBasedStateMachine):
    """A worker computes the prompts of two routers in order. Its reports reach each router late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = {name: InFlight(name) for name in (ME, OTHER)}
        self.queue: list[Sent] = []
        self.reports = [IDLE]
        self.seen = dict.fromkeys(self.routers, 0)
        #: Time of the latest give-up after which no prompt of that router has been computed.
        self.given_up: dict[RouterId, int | None] = dict.fromkeys(self.routers)
        self.epoch = 1
        self.now = 0

    def queued(self) -> Counter[RouterId]:
        return sum((Counter({sent.router.router_id: sent.tokens}) for sent in self.queue), Counter())

    @rule(name=st.sampled_from([ME, OTHER]), tokens=st.integers(1, 900))
    def send(self, name: RouterId, tokens: int) -> None:
        self.now += 1
        sent = Sent(self.routers[name], tokens, QueuedPrompt(self.routers[name]), self.now)
        assert sent.prompt is not None
        sent.assigned.enter_context(sent.prompt.assigned(report(self.epoch), tokens))
        self.queue.append(sent)

    @precondition(lambda self: self.queue)
    @rule(tokens=st.integers(1, 900))
    def compute(self, tokens: int) -> None:
        """A step, whose progress or first token arrives at once."""
        first = self.queue[0]
        first.tokens -= min(tokens, first.tokens)
        if not first.tokens:
            del self.queue[0]
        if first.prompt is not None and first.tokens:
            first.prompt.update(first.tokens)
        elif first.prompt is not None:
            first.prompt.mark_computed()
            given_up = self.given_up[first.router.router_id]
            if given_up is not None and given_up < first.at:
                self.given_up[first.router.router_id] = None

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), at_once=st.booleans())
    def give_up(self, data: st.DataObject, at_once: bool) -> None:
        """A client leaves, and the worker drops the prompt at once or later."""
        sent = data.draw(st.sampled_from(self.queue))
        if sent.prompt is not None:
            sent.give_up()
            self.now += 1
            self.given_up[sent.router.router_id] = self.now
        if at_once:
            self.queue.remove(sent)

    @rule()
    def die(self) -> None:
        """All calls to the worker break, and a successor takes its name."""
        for sent in self.queue:
            sent.give_up()
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
        """A router reads a report that may be old, but not older than the one before."""
        self.seen[name] = data.draw(st.integers(self.seen[name], len(self.reports) - 1))

    @invariant()
    def each_router_counts_its_own_prompts_exactly_and_those_of_others_as_reported(self) -> None:
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
