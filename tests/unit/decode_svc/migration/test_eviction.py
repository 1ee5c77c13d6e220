"""Which request a decode worker asks to leave when its blocks run short."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from decode_svc.migration.eviction import Eviction, EvictionPolicy
from pdserve.base.ids import AttemptId, RequestId
from pdserve.engine.step import Load, StepEvents
from pdserve.worker.serve.inboxes import Inboxes

OLD, MIDDLE, YOUNG = (AttemptId(RequestId(name), 1) for name in ("old", "middle", "young"))
FULL = Load(
    num_running=3,
    num_waiting=0,
    num_held=0,
    queued_prompt_tokens=0,
    queued_by_router={},
    free_blocks=5,
    total_blocks=64,
    reserved_blocks=0,
    waiting_blocks=0,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
)


def test_one_request_at_a_time_leaves_while_there_are_few_free_blocks_for_those_that_run() -> None:
    policy = EvictionPolicy()
    assert not policy.is_due(replace(FULL, free_blocks=6), 1.0)
    assert policy.is_due(FULL, 1.0)
    assert not policy.is_due(FULL, 1.1)
    assert policy.is_due(FULL, 1.3)


def test_a_request_that_runs_alone_stays() -> None:
    """It gains nothing: a worker with all its blocks for one request is as good as another."""
    assert not EvictionPolicy().is_due(replace(FULL, num_running=1, free_blocks=0), 1.0)


def test_the_youngest_that_does_not_end_soon_leaves_and_is_not_chosen_again_at_once() -> None:
    policy, tokens_left = EvictionPolicy(), {OLD: 500, MIDDLE: 100, YOUNG: 100}
    assert policy.choose(tokens_left, 1.0) == YOUNG
    assert policy.choose({**tokens_left, MIDDLE: 20}, 1.3) == OLD
    assert policy.choose({MIDDLE: 20, YOUNG: 100}, 1.6) is None
    assert policy.choose(tokens_left, 5.1) == YOUNG


def test_what_has_left_is_forgotten() -> None:
    policy = EvictionPolicy()
    assert policy.choose({OLD: 500}, 1.0) == OLD
    assert policy.choose({}, 1.1) is None
    assert policy.choose({OLD: 500}, 1.2) == OLD


async def test_a_preempted_request_may_leave_although_its_blocks_are_free_now() -> None:
    inboxes: Inboxes[Any] = Inboxes()
    eviction = Eviction(worker=None, migrating=None, inboxes=inboxes)  # type: ignore[arg-type]
    step: Any = SimpleNamespace(
        events=StepEvents(tier="decode", preempted=(YOUNG,)), load=replace(FULL, num_running=2, free_blocks=40)
    )
    async with inboxes.open(*YOUNG) as inbox:
        eviction.after_step(step)
        event = await inbox.next()
    assert event.leave.reason == "full"


def test_a_few_that_run_longest_leave_when_the_load_is_balanced() -> None:
    """No more sequences than are wanted, none that ends soon, and none twice."""
    policy = EvictionPolicy()
    names = [AttemptId(RequestId(f"r{index}"), 1) for index in range(6)]
    running = {name: (100 + index, 1) for index, name in enumerate(names)}
    running |= {OLD: (500, 3), YOUNG: (20, 1)}
    assert policy.choose_longest(running, 2, 1.0) == [names[5], names[4]]
    assert policy.choose_longest(running, 9, 2.0) == [OLD, names[3], names[2], names[1]]
    assert policy.choose_longest(running, 9, 3.0) == [names[0]]
    assert policy.choose_longest(running, 9, 5.5) == [names[5], names[4]]


async def test_what_was_decided_of_an_older_attempt_reaches_no_newer_one() -> None:
    stale: list[str] = []
    inboxes: Inboxes[Any] = Inboxes(lambda kind, error: stale.append(kind))
    eviction = Eviction(worker=None, migrating=None, inboxes=inboxes)  # type: ignore[arg-type]
    load = replace(FULL, num_running=2, free_blocks=40)
    step: Any = SimpleNamespace(events=StepEvents(tier="decode", preempted=(YOUNG,)), load=load)
    async with inboxes.open(YOUNG.request_id, YOUNG.attempt + 1) as inbox:
        eviction.after_step(step)
        assert await inbox.next(timeout_s=0.0) is None
    assert stale == ["event"]
