"""How long a worker may be silent, with and without keep-alives."""

from __future__ import annotations

from dataclasses import replace

from router_svc.routing.silence import SilenceLimits, means_hang
from tests.support.records import worker_record

LIMITS = SilenceLimits(silence_timeout_s=10, token_timeout_s=300)
OLD = worker_record()
NEW = replace(OLD, keep_alive_s=1.0)


def test_a_worker_that_sends_keep_alives_is_noticed_in_seconds_before_its_ticket_and_after_it() -> None:
    assert LIMITS.of_decode(NEW, has_started=False) == 10
    assert LIMITS.of_decode(NEW, has_started=True) == 10
    assert LIMITS.of_prefill(NEW, None) == 10


def test_no_keep_alive_is_expected_from_a_worker_that_announces_none() -> None:
    assert LIMITS.of_decode(OLD, has_started=False) is None
    assert LIMITS.of_decode(OLD, has_started=True) == 300
    assert LIMITS.of_prefill(OLD, None) == 300
    assert not means_hang(OLD, 300)


def test_a_worker_that_lives_may_take_any_time_to_start() -> None:
    assert LIMITS.of_start(NEW) is None
    assert LIMITS.of_start(OLD) == 300


def test_a_prefill_worker_is_given_up_while_its_ticket_can_be_renewed() -> None:
    for worker in (OLD, NEW):
        assert LIMITS.of_prefill(worker, 4.0) == 3.0
    assert LIMITS.of_prefill(NEW, 20.0) == 10


def test_a_late_keep_alive_is_no_hang() -> None:
    slow = replace(NEW, keep_alive_s=5.0)
    assert LIMITS.of_decode(slow, has_started=True) == 15
    assert not means_hang(slow, 14.9)
    assert means_hang(slow, 15)
