"""The admission queue: order, bounds, and Retry-After."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import Overloaded
from router_svc.generation import BATCH_PRIORITY
from router_svc.request.admission import PASSING_S, AdmissionQueue, DrainRate, Entrant
from router_svc.request.client import ANONYMOUS, Client
from router_svc.request.fair_order import QueueSlot


def queue(*, capacity: int = 2, max_waiting: int = 3, max_wait_s: float = 1000.0) -> AdmissionQueue:
    made = AdmissionQueue(max_waiting=max_waiting, max_wait_s=max_wait_s)
    made.set_capacity(capacity, 0.0)
    return made


def offer(
    waiting: AdmissionQueue, sequences: int = 1, now: float = 0.0, *, client: str = "", priority: int = 0
) -> QueueSlot:
    [slot] = waiting.offer([Entrant(sequences=sequences, priority=priority)], Client(id=client), now).slots
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


def test_narrow_requests_pass_a_wide_one_but_not_for_long() -> None:
    waiting = queue(capacity=4, max_waiting=9)
    running = offer(waiting, 2)
    wide = offer(waiting, 4, 1.0)
    first, second = offer(waiting, 1, 2.0), offer(waiting, 1, 3.0)
    assert (first.admitted_at, second.admitted_at) == (2.0, 3.0)
    waiting.leave(running, 1.0 + PASSING_S)
    late = offer(waiting, 1, 1.0 + PASSING_S)
    assert late.admitted_at is None
    assert waiting.leave(first, 10.0) == []
    assert waiting.leave(second, 11.0) == [wide]
    assert waiting.leave(wide, 12.0) == [late]


def test_best_effort_requests_take_no_capacity_from_others_and_only_what_they_leave() -> None:
    waiting = queue(capacity=2)
    batch = [offer(waiting, priority=BATCH_PRIORITY) for _ in range(3)]
    assert [slot.admitted_at is not None for slot in batch] == [True, True, False]
    others = [offer(waiting) for _ in range(3)]
    assert [slot.admitted_at is not None for slot in others] == [True, True, False]
    assert waiting.leave(batch[0], 1.0) == []
    assert waiting.leave(others[0], 1.0) == [others[2]]
    assert waiting.leave(others[1], 2.0) == []
    assert waiting.leave(others[2], 3.0) == [batch[2]]


def test_a_wide_best_effort_request_that_waits_long_holds_up_no_other() -> None:
    waiting = queue(capacity=4)
    first = offer(waiting)
    wide = offer(waiting, 4, priority=BATCH_PRIORITY)
    assert offer(waiting, now=PASSING_S + 1).admitted_at is not None
    assert wide.blocked_at is not None
    late = offer(waiting, now=2 * PASSING_S + 2, priority=BATCH_PRIORITY)
    assert (first.admitted_at, late.admitted_at) == (0.0, None)


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
        waiting.offer([Entrant(sequences=1)] * 4, ANONYMOUS, 0.0)
    assert (waiting.num_waiting, waiting.num_admitted) == (0, 0)
    assert [slot.admitted_at for slot in waiting.offer([Entrant(sequences=1)] * 3, ANONYMOUS, 0.0).slots] == [
        0.0,
        None,
        None,
    ]


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


def test_time_without_a_worker_does_not_make_the_cluster_look_slow() -> None:
    """Found by the simulation: clients got 429 with a wait of minutes while a worker came back within seconds."""
    waiting = queue(capacity=1, max_waiting=100, max_wait_s=20.0)
    slots = [offer(waiting) for _ in range(20)]
    for number in range(10):
        waiting.leave(slots[number], 0.1 * number)
    waiting.set_capacity(0, 1.0)
    offer(waiting, now=25.0)
    waiting.set_capacity(1, 30.0)
    slot = offer(waiting, now=30.0)
    assert slot.admitted_at is None
    assert waiting.retry_after_s(30.0) < 5.0


def test_a_cluster_that_stopped_draining_does_not_look_fast() -> None:
    rate = DrainRate()
    for now in (0.0, 0.1, 0.2, 0.3):
        rate.note(now)
    assert rate.per_second(0.4) == pytest.approx(10.0)
    assert rate.per_second(40.0) == pytest.approx(0.1)
    assert rate.per_second(100.0) is None


@given(st.lists(st.tuples(st.sampled_from(["offer", "leave", "capacity"]), st.integers(0, 35)), max_size=60))
def test_capacity_is_never_exceeded_nor_left_idle_and_no_client_overtakes_itself(moves: list[tuple[str, int]]) -> None:
    waiting = AdmissionQueue(max_waiting=5, max_wait_s=1e9)
    capacity = 0
    alive: list[QueueSlot] = []
    for now, (move, number) in enumerate(moves):
        num_before = sum(slot.admitted_at is not None for slot in alive)
        if move == "offer":
            entrant = Entrant(sequences=number % 3 + 1, priority=number % 2)
            try:
                offered = waiting.offer([entrant], Client(id="abc"[number // 6 % 3], weight=number % 5 + 1), float(now))
            except Overloaded:
                assert waiting.num_waiting == 5
            else:
                alive = [slot for slot in alive if slot not in offered.displaced] + offered.slots
                assert all(slot.admitted_at is None for slot in offered.displaced)
        elif move == "leave" and alive:
            waiting.leave(alive.pop(number % len(alive)), float(now))
        elif move == "capacity":
            capacity = number % 10
            waiting.set_capacity(capacity, float(now))
        admitted = [slot for slot in alive if slot.admitted_at is not None]
        in_use = sum(slot.sequences for slot in admitted)
        if len(admitted) > num_before:
            assert in_use <= capacity or len(admitted) == 1
        assert waiting.num_admitted == len(admitted)
        assert waiting.num_waiting == len(alive) - len(admitted) <= 5
        idle = [slot for slot in alive if slot.admitted_at is None and in_use + slot.sequences <= capacity]
        assert not idle or any(slot.blocked_at is not None for slot in alive)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_a_client_does_not_overtake_itself(names: list[int]) -> None:
    waiting = queue(capacity=1, max_waiting=99)
    running = offer(waiting)
    slots = [offer(waiting, client=str(name)) for name in names]
    order: list[QueueSlot] = []
    while waiting.num_waiting:
        [running] = waiting.leave(running, 1.0)
        order.append(running)
    for name in set(names):
        own = [slot for slot in slots if slot.client.id == str(name)]
        assert [slot for slot in order if slot in own] == own


def test_clients_take_turns_whatever_one_of_them_asks_for() -> None:
    waiting = queue(capacity=1, max_waiting=99)
    running = offer(waiting, client="a")
    waiting.offer([Entrant(sequences=1)] * 50, Client(id="a"), 0.0)
    others = [offer(waiting, client=name) for name in "bcb"]
    order = []
    for _ in range(6):
        [running] = waiting.leave(running, 1.0)
        order.append(running.client.id)
    assert all(slot.admitted_at is not None for slot in others)
    assert sorted(order) == ["a", "a", "a", "b", "b", "c"]


def test_a_client_of_twice_the_weight_gets_twice_as_much() -> None:
    waiting = queue(capacity=1, max_waiting=99)
    running = offer(waiting)
    for name, weight in (("light", 1.0), ("heavy", 2.0)):
        waiting.offer([Entrant(sequences=1)] * 30, Client(id=name, weight=weight), 0.0)
    order = []
    for _ in range(30):
        [running] = waiting.leave(running, 1.0)
        order.append(running.client.id)
    assert order.count("heavy") in (19, 20, 21)


def test_wide_requests_count_as_much_as_they_take() -> None:
    waiting = queue(capacity=4, max_waiting=99)
    running = offer(waiting, 4)
    for name, width in (("wide", 4), ("narrow", 1)):
        waiting.offer([Entrant(sequences=width)] * 20, Client(id=name), 0.0)
    sequences = dict.fromkeys(("wide", "narrow"), 0)
    admitted = waiting.leave(running, 1.0)
    for step in range(1, 9):
        for slot in admitted:
            sequences[slot.client.id] += slot.sequences
        admitted = [new for slot in admitted for new in waiting.leave(slot, 2 * PASSING_S * step)]
    assert min(sequences.values()) >= 8
    assert abs(sequences["narrow"] - sequences["wide"]) <= 4


def test_priorities_come_before_fairness() -> None:
    waiting = queue(capacity=1, max_waiting=9)
    running = offer(waiting)
    late = offer(waiting, client="a", priority=5)
    usual = offer(waiting, client="a")
    urgent = offer(waiting, client="b", priority=-1)
    for expected in (urgent, usual, late):
        [running] = waiting.leave(running, 1.0)
        assert running is expected


def test_one_request_of_many_prompts_does_not_fill_the_queue_for_others() -> None:
    waiting = queue(capacity=1, max_waiting=8)
    offer(waiting, client="a")
    many = waiting.offer([Entrant(sequences=1)] * 8, Client(id="a"), 0.0).slots
    with pytest.raises(Overloaded, match="queue is full"):
        offer(waiting, client="a")
    others = [waiting.offer([Entrant(sequences=1)], Client(id=name), 0.0) for name in "bcde"]
    assert [offered.displaced for offered in others] == [[many[7]], [many[6]], [many[5]], [many[4]]]
    assert waiting.num_waiting == 8


def test_clients_that_hold_no_more_than_others_are_not_displaced() -> None:
    waiting = queue(capacity=1, max_waiting=2)
    offer(waiting)
    offer(waiting, client="a")
    offer(waiting, client="b")
    with pytest.raises(Overloaded):
        offer(waiting, client="c")
    with pytest.raises(Overloaded):
        waiting.offer([Entrant(sequences=1)] * 2, Client(id="c"), 0.0)


def test_a_less_urgent_request_displaces_no_urgent_one() -> None:
    waiting = queue(capacity=1, max_waiting=4)
    offer(waiting)
    for _ in range(4):
        offer(waiting, client="a", priority=-1)
    with pytest.raises(Overloaded):
        offer(waiting, client="b")
    assert waiting.offer([Entrant(sequences=1, priority=-1)], Client(id="b"), 0.0).displaced


def test_a_light_client_does_not_wait_as_long_as_a_heavy_one() -> None:
    waiting = queue(capacity=1, max_waiting=99, max_wait_s=10.0)
    running = offer(waiting, client="a")
    waiting.offer([Entrant(sequences=1)] * 40, Client(id="a"), 0.0)
    for second in range(1, 6):
        [running] = waiting.leave(running, float(second))
    with pytest.raises(Overloaded, match="limit 10 s"):
        offer(waiting, client="a", now=5.0)
    offer(waiting, client="b", now=5.0)


def test_the_uncached_tokens_of_the_queue_are_those_of_its_prompts() -> None:
    waiting = queue(capacity=1, max_waiting=5)
    entrants = [Entrant(sequences=1, uncached_tokens=tokens) for tokens in (7, 20, 300)]
    first, second, third = waiting.offer(entrants, ANONYMOUS, 0.0).slots
    assert waiting.uncached_tokens == 320
    waiting.leave(first, 1.0)
    assert waiting.uncached_tokens == 300
    waiting.leave(third, 1.0)
    waiting.leave(second, 1.0)
    assert waiting.uncached_tokens == 0
