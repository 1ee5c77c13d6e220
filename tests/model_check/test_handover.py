"""Every way that a handover can go, with a ticket, its renewal, and all that may happen to them."""

from __future__ import annotations

import dataclasses

import pytest

from kvtransfer.handover.events import (
    CancelReceives,
    CommitArrived,
    MessagesReceived,
    ReceiveEffect,
    Released,
    SendEffect,
    WatchLease,
)
from kvtransfer.handover.receive_machine import ReceiveMachine, ReceiveState
from kvtransfer.handover.send_machine import SendMachine, SendState
from pdserve.base.errors import PdserveError
from tests.model_check.handover import Bounds, HandoverWorld
from tests.model_check.search import Counterexample, Searched, search
from tests.support.depth import IS_FULL

_NOTHING = Bounds(renewals=0, damages=0, losses=0, aborts=0, deaths=0, repeated_commits=0, stray_commits=0)
#: What may happen at most, besides everything that has to. All at once would be millions of states.
CASES = {
    "two blocks": {"num_blocks": 2},
    "a damaged message": {"num_blocks": 1, "damages": 1, "repeated_commits": 1},
    "a lost message": {"num_blocks": 1, "losses": 1, "repeated_commits": 1},
    "two layer groups that are copied": {"num_blocks": 1, "layer_groups": 2, "copies": True},
    "a death and an abort": {"num_blocks": 1, "deaths": 1, "aborts": 1, "copies": True},
    "offered blocks": {"num_blocks": 2, "offers": True},
    "offered blocks that are let go": {"num_blocks": 1, "offers": True, "losses": 1, "aborts": 1},
    "an offer of a sender that dies": {"num_blocks": 1, "offers": True, "deaths": 1},
    "offers behind a renewed ticket": {"num_blocks": 1, "offers": True, "renewals": 1, "is_coarse": True},
    "a renewed ticket": {"num_blocks": 1, "renewals": 1, "is_coarse": True},
    "a stale commit": {"num_blocks": 1, "renewals": 1, "stray_commits": 1, "is_coarse": True},
}
DEEP = {
    "two damaged blocks": {"num_blocks": 2, "damages": 1, "losses": 1},
    "a renewed ticket in small steps": {"num_blocks": 1, "renewals": 1, "copies": True},
    "a renewed ticket and a damaged message": {"num_blocks": 1, "renewals": 1, "damages": 1, "is_coarse": True},
    "a renewed ticket and a death": {"num_blocks": 1, "renewals": 1, "deaths": 1, "is_coarse": True},
}


def checked(**may_happen: object) -> Searched:
    """Searches with these bounds. Raises `Counterexample`."""
    return search(HandoverWorld(dataclasses.replace(_NOTHING, **may_happen)), max_states=2_000_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", {**CASES, **(DEEP if IS_FULL else {})})
def test_no_order_of_events_gives_a_block_two_owners_or_holds_it_forever(case: str) -> None:
    found = checked(**{**CASES, **DEEP}[case])
    assert found.num_final > 10


def test_every_state_of_both_machines_is_reached() -> None:
    seen: set[object] = set()

    class Watched(HandoverWorld):
        def key(self) -> object:
            for transfer in self.transfers:
                seen.add(transfer.receive.state)
                seen.add(transfer.send and transfer.send.state)
            return super().key()

    search(Watched(dataclasses.replace(_NOTHING, num_blocks=1, losses=1, aborts=1)), max_states=100_000)
    assert {*ReceiveState, *SendState} <= seen


# What the search finds when a machine is changed.
def test_a_sender_that_lets_go_of_blocks_on_the_wire_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(machine: SendMachine) -> list[SendEffect]:
        machine.state = SendState.CLOSED
        return [Released(error=None)]

    monkeypatch.setattr(SendMachine, "_try_release", release)
    with pytest.raises(Counterexample, match="the wire still reads"):
        checked(num_blocks=1, aborts=1)


@pytest.mark.parametrize("bounds", [{"damages": 1}, {"offers": True}])
def test_a_commit_without_a_look_at_the_digests_is_found(
    monkeypatch: pytest.MonkeyPatch, bounds: dict[str, object]
) -> None:
    """Offered blocks may be copied after their sender has let them go."""

    def received(machine: ReceiveMachine, event: MessagesReceived, now: float) -> list[ReceiveEffect]:
        return take(machine, dataclasses.replace(event, digests=(b"good",) * len(event.digests)), now)

    take = ReceiveMachine._on_received
    monkeypatch.setattr(ReceiveMachine, "_on_received", received)
    with pytest.raises(Counterexample, match="is committed with"):
        checked(num_blocks=1, **bounds)


def test_a_commit_of_any_attempt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(machine: ReceiveMachine, event: CommitArrived, now: float) -> list[ReceiveEffect]:
        return take(machine, dataclasses.replace(event, attempt=machine._attempt), now)

    take = ReceiveMachine._on_commit
    monkeypatch.setattr(ReceiveMachine, "_on_commit", commit)
    with pytest.raises(Counterexample, match="a stale attempt's commit"):
        checked(num_blocks=1, renewals=1, stray_commits=1, is_coarse=True)


def test_a_lease_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_passed(machine: ReceiveMachine, now: float) -> list[ReceiveEffect]:
        return [WatchLease(until=machine.deadline)]

    monkeypatch.setattr(ReceiveMachine, "_on_time", time_passed)
    with pytest.raises(Counterexample, match="nothing leads to an end"):
        checked(num_blocks=1)


def test_a_ticket_that_is_renewed_before_the_old_one_is_quiet_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(machine: ReceiveMachine, error: PdserveError | None) -> list[ReceiveEffect]:
        machine.state = ReceiveState.CANCELLING
        return [CancelReceives(), Released(error=None)]

    monkeypatch.setattr(ReceiveMachine, "_cancel", cancel)
    with pytest.raises(Counterexample, match="two owners"):
        checked(num_blocks=1, renewals=1, is_coarse=True)
