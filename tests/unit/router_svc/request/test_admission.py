"""The admission queue: order, bounds, and Retry-After."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import Overloaded
from router_svc.request.admission import AdmissionQueue, DrainRate, Entrant, QueueSlot


def queue(*, capacity: int = 2, max_waiting: int = 3, max_wait_s: float = 1000.0) -> AdmissionQueue:
    made = AdmissionQueue(max_waiting=max_waiting, max_wait_s=max_wait_s)
    made.set_capacity(capacity, 0.0)
    return made


def offer(waiting: AdmissionQueue, sequences: int = 1, now: float = 0.0) -> QueueSlot:
    [slot] = waiting.offer([Entrant(sequences=sequences)], now)
    return slot


def test_requests_start_at_once_while_there_is_capacity_and_then_wait_in_order() -> None:
    waiting = queue()
    running = [offer(waiting), offer(waiting)]
    assert all(slot.admitted_at == 0.0 for slot in running)
    third, fourth = offer(waiting, now=1.0), offer(waiting, now=2.0)
    assert third.admitted_at is None
    assert waiting.leave(running[0], 3.0) == [third]
    assert waiting.leave(running[1], 4.0) == [fourth]
    assert (third.admitted_at, fourth.admitted_at) == (3.0, 4.0)


def test_a_slot_given_up_in_the_queue_is_skipped() -> None:
    waiting = queue(capacity=1)
    running, second, third = offer(waiting), offer(waiting), offer(waiting)
    waiting.leave(second, 1.0)
    assert waiting.leave(running, 2.0) == [third]


def test_a_wide_request_is_not_overtaken_by_narrow_ones() -> None:
    waiting = queue(capacity=4)
    running = offer(waiting, 2)
    wide, narrow = offer(waiting, 4), offer(waiting, 1)
    assert narrow.admitted_at is None
    assert waiting.leave(running, 1.0) == [wide]
    assert waiting.leave(wide, 2.0) == [narrow]


def test_a_request_wider_than_the_cluster_runs_alone() -> None:
    waiting = queue(capacity=4)
    running = offer(waiting, 1)
    wide = offer(waiting, 100)
    assert waiting.leave(running, 1.0) == [wide]


def test_nothing_starts_without_capacity_and_everything_with_it() -> None:
    waiting = queue(capacity=0)
    slots = [offer(waiting), offer(waiting)]
    assert waiting.set_capacity(8, 5.0) == slots


def test_a_full_queue_refuses_and_names_the_number_waiting_and_the_limit() -> None:
    waiting = queue(capacity=1, max_waiting=2)
    for _ in range(3):
        offer(waiting)
    with pytest.raises(Overloaded, match=r"queue is full \(2 waiting, limit 2\). Retry after 1 s"):
        offer(waiting)
    assert waiting.num_waiting == 2


def test_prompts_of_one_request_get_all_slots_or_none() -> None:
    waiting = queue(capacity=1, max_waiting=2)
    with pytest.raises(Overloaded):
        waiting.offer([Entrant(sequences=1)] * 4, 0.0)
    assert (waiting.num_waiting, waiting.num_admitted) == (0, 0)
    assert [slot.admitted_at for slot in waiting.offer([Entrant(sequences=1)] * 3, 0.0)] == [0.0, None, None]


def test_retry_after_is_the_time_to_empty_the_queue_at_the_measured_rate() -> None:
    waiting = queue(capacity=1, max_waiting=5)
    slots = [offer(waiting) for _ in range(6)]
    for second in range(1, 6):  # Each second one leaves and one arrives.
        waiting.leave(slots[second - 1], float(second))
        slots.append(offer(waiting, now=float(second)))
    with pytest.raises(Overloaded) as refusal:
        offer(waiting, now=6.0)
    # 5 departures in 5 s are 1 per second; 5 wait, plus the new one.
    assert refusal.value.retry_after_s == 6.0


def test_retry_after_is_bounded() -> None:
    waiting = queue(capacity=1, max_waiting=100)
    assert waiting.retry_after_s(0.0) == 1.0
    slots = [offer(waiting) for _ in range(100)]
    for number in range(4):
        waiting.leave(slots[number], 15.0 * number)
    assert waiting.retry_after_s(59.0) == 60.0


def test_a_wait_that_would_be_too_long_is_refused_before_it_begins() -> None:
    waiting = queue(capacity=1, max_waiting=100, max_wait_s=10.0)
    slots = [offer(waiting) for _ in range(9)]
    for second in range(4):
        waiting.leave(slots[second], 2.0 * second)
    with pytest.raises(Overloaded, match=r"limit 10 s"):
        for _ in range(50):
            offer(waiting, now=6.0)
    assert 4 < waiting.num_waiting < 50


def test_a_cluster_that_stopped_draining_does_not_look_fast() -> None:
    rate = DrainRate()
    for now in (0.0, 0.1, 0.2, 0.3):
        rate.note(now)
    assert rate.per_second(0.4) == pytest.approx(10.0)
    assert rate.per_second(40.0) == pytest.approx(0.1)
    assert rate.per_second(100.0) is None


@given(st.lists(st.tuples(st.sampled_from(["offer", "leave", "capacity"]), st.integers(0, 10)), max_size=60))
def test_capacity_is_never_exceeded_and_order_never_broken(moves: list[tuple[str, int]]) -> None:
    waiting = AdmissionQueue(max_waiting=5, max_wait_s=1e9)
    capacity = 0
    alive: list[QueueSlot] = []
    for now, (move, number) in enumerate(moves):
        before = [slot for slot in alive if slot.admitted_at is not None]
        if move == "offer":
            try:
                alive += waiting.offer([Entrant(sequences=number % 3 + 1)], float(now))
            except Overloaded:
                assert waiting.num_waiting == 5
        elif move == "leave" and alive:
            waiting.leave(alive.pop(number % len(alive)), float(now))
        elif move == "capacity":
            capacity = number
            waiting.set_capacity(capacity, float(now))
        admitted = [slot for slot in alive if slot.admitted_at is not None]
        if len(admitted) > len(before):
            assert sum(slot.sequences for slot in admitted) <= capacity or len(admitted) == 1
        assert waiting.num_admitted == len(admitted)
        assert waiting.num_waiting == len(alive) - len(admitted)
        # Slots are admitted in order of arrival.
        flags = [slot.admitted_at is not None for slot in alive]
        assert flags == sorted(flags, reverse=True)


def test_the_uncached_tokens_of_the_queue_are_those_of_its_prompts() -> None:
    waiting = queue(capacity=1, max_waiting=5)
    first, second, third = waiting.offer([Entrant(sequences=1, uncached_tokens=tokens) for tokens in (7, 20, 300)], 0.0)
    assert waiting.uncached_tokens == 320
    waiting.leave(first, 1.0)
    assert waiting.uncached_tokens == 300
    waiting.leave(third, 1.0)
    waiting.leave(second, 1.0)
    assert waiting.uncached_tokens == 0
