"""A tier that has lost all of its workers gets one of the other tier, once the time for a restart is over."""

from __future__ import annotations

from dataclasses import replace

from pdserve.peers.workers import Tier, WorkerRecord
from router_svc.routing.role_policy import RolePolicy
from tests.support.records import worker_record

AFTER_S = 5.0


def worker(name: str, tier: Tier, home: Tier | None) -> WorkerRecord:
    return replace(worker_record(name, tier=tier), home_tier=home)


P0, P1 = worker("prefill-0", "prefill", "prefill"), worker("prefill-1", "prefill", "prefill")
D0, D1 = worker("decode-0", "decode", "decode"), worker("decode-1", "decode", "decode")


class Looks:
    """A policy that has seen both tiers."""

    def __init__(self, *, expects_prefill: bool = True) -> None:
        self.policy = RolePolicy(after_s=AFTER_S, expects_prefill=expects_prefill)
        assert self.at(0.0, P0, D0) is None

    def at(self, now: float, *ready: WorkerRecord, is_readable: bool = True) -> tuple[str, Tier] | None:
        order = self.policy.next(ready, is_readable=is_readable, now=now)
        return None if order is None else (order.worker.worker_id, order.role)


def test_a_lost_decode_tier_gets_a_prefill_worker_after_the_time_for_a_restart() -> None:
    looks = Looks()
    assert looks.at(1.0, P1, P0) is None
    assert looks.at(5.9, P1, P0) is None
    assert looks.at(6.0, P1, P0) == ("prefill-0", "decode")
    # The order takes a moment to show, and is not given to another worker meanwhile.
    assert looks.at(6.5, P1, P0) is None
    assert looks.at(11.0, P1, P0) == ("prefill-0", "decode")


def test_a_tier_that_is_back_in_time_changes_nothing() -> None:
    looks = Looks()
    assert [looks.at(at, P0) for at in (1.0, 5.0)] == [None, None]
    assert looks.at(5.5, P0, D0) is None
    assert looks.at(7.0, P0) is None
    assert looks.at(11.0, P0) is None


def test_a_worker_away_from_its_tier_goes_back_when_the_other_tier_can_spare_it() -> None:
    looks = Looks()
    moved = replace(P1, tier="decode")
    assert looks.at(1.0, D0, moved) is None
    assert looks.at(6.0, D0, moved) == ("prefill-1", "prefill")


def test_the_last_decode_worker_stays_since_it_prefills_too() -> None:
    looks = Looks()
    assert [looks.at(at, D0) for at in (1.0, 6.0, 60.0)] == [None, None, None]
    assert looks.at(61.0, D0, D1) == ("decode-0", "prefill")


def test_without_expected_prefill_workers_decode_workers_stay() -> None:
    looks = Looks(expects_prefill=False)
    assert [looks.at(at, D0, D1) for at in (1.0, 60.0)] == [None, None]
    assert looks.at(61.0, D0, D1, replace(P0, tier="decode")) == ("prefill-0", "prefill")


def test_workers_with_one_role_for_life_keep_it() -> None:
    looks = Looks()
    fixed = replace(P0, home_tier=None)
    assert [looks.at(at, fixed) for at in (1.0, 60.0)] == [None, None]
    assert looks.at(61.0, fixed, P1) == ("prefill-1", "decode")


def test_no_time_counts_while_the_registry_cannot_be_read() -> None:
    looks = Looks()
    assert looks.at(1.0, P0) is None
    assert looks.at(7.0, P0, is_readable=False) is None
    assert looks.at(8.0, P0) is None
    assert looks.at(13.0, P0) == ("prefill-0", "decode")


def test_at_the_start_workers_of_both_tiers_are_waited_for() -> None:
    policy = RolePolicy(after_s=AFTER_S, expects_prefill=True)
    assert [policy.next([P0], is_readable=True, now=now) for now in (0.0, 60.0)] == [None, None]
