"""Every order in which a decode worker's requests may come, get blocks, receive, run and leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_svc.request import TRANSITIONS, DecodeMove, DecodePhase, ScheduledRequest
from decode_svc.reservations import Reservations
from decode_svc.scheduler import DecodeScheduler
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.running import Room, RunningSet
from tests.model_check.reservations import Bounds, Job, ReservationWorld
from tests.model_check.search import Counterexample, Searched, search
from tests.support.depth import IS_FULL

_TWO = (Job(prompt=5, max_tokens=2), Job(prompt=4, max_tokens=3))
CASES = {
    "each needs nearly all blocks": Bounds(jobs=_TWO),
    "more than may be reserved": Bounds(
        jobs=(Job(prompt=7, max_tokens=2), _TWO[1]), num_blocks=5, max_reserved_share=0.25
    ),
    "three": Bounds(jobs=(*_TWO, Job(prompt=3, max_tokens=2)), aborts=0),
    "two choices": Bounds(jobs=(Job(prompt=3, max_tokens=2, n=2), _TWO[1]), num_blocks=5, stops=1),
    "computed here, and failing": Bounds(jobs=(Job(prompt=5, max_tokens=3, threshold=9), _TWO[1]), failures=1, stops=1),
    "one from another worker": Bounds(jobs=(Job(prompt=3, max_tokens=6, output=2), _TWO[1]), num_blocks=5, stops=1),
    "one from another worker, with more choices than fit": Bounds(
        jobs=(Job(prompt=2, max_tokens=6, output=3, n=3), Job(prompt=2, max_tokens=2))
    ),
}
DEEP = {
    "three, of which two may leave": Bounds(jobs=(*_TWO, Job(prompt=3, max_tokens=2)), aborts=2),
    "three with choices": Bounds(
        jobs=(Job(prompt=3, max_tokens=3, n=2), _TWO[1], Job(prompt=5, max_tokens=2, threshold=4)),
        num_blocks=5,
        stops=1,
    ),
    "two from other workers": Bounds(
        jobs=(Job(prompt=3, max_tokens=6, output=2, n=2), Job(prompt=4, max_tokens=5, output=1), _TWO[1]),
        num_blocks=6,
        aborts=2,
    ),
}


def checked(case: str) -> Searched:
    """Searches one of the cases. Raises `Counterexample`."""
    return search(ReservationWorld({**CASES, **DEEP}[case]), max_states=500_000)


@pytest.mark.parametrize("case", {**CASES, **(DEEP if IS_FULL else {})})
def test_every_reservation_ends_and_no_block_has_two_owners(case: str) -> None:
    found = checked(case)
    assert found.num_final > 5
    assert {"arrive", "step", "commit", "lease-ends"} <= found.actions


def test_every_move_of_the_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[DecodePhase, DecodeMove]] = set()
    advance = ScheduledRequest.advance

    def watched(request: ScheduledRequest, move: DecodeMove) -> None:
        made.add((request.phase, move))
        advance(request, move)

    monkeypatch.setattr(ScheduledRequest, "advance", watched)
    checked("computed here, and failing")
    assert made == set(TRANSITIONS)


# What the search finds when something is taken away.
def _count_forever(reservations: Any, request: Any) -> None:
    missing = reservations._missing.get(request.request_id, 0)
    _remove(reservations, request)
    reservations._num_missing += missing


_remove = Reservations.remove


def _finish_in_silence(scheduler: Any, request: Any, outcome: Any) -> None:
    before = scheduler._must_rescan_waiting
    _finish(scheduler, request, outcome)
    scheduler._must_rescan_waiting = before


_finish = DecodeScheduler._finish


def _within_the_share(reservations: Any, num_blocks: int, room: Room) -> bool:
    fits: bool = reservations._num_missing + num_blocks <= reservations._limits.max_reserved_blocks
    return fits


def _from_the_first(manager: Any, num_tokens: int, num_cached: int) -> tuple[int, ...]:
    return (0,) * manager.pool.num_groups


@pytest.mark.parametrize(
    ("owner", "name", "change", "case", "finding"),
    [
        (Reservations, "remove", _count_forever, "three", "missing blocks are miscounted"),
        (Reservations, "_may_receive", _within_the_share, "more than may be reserved", "nothing leads to an end"),
        (DecodeScheduler, "_finish", _finish_in_silence, "each needs nearly all blocks", "nothing leads to an end"),
        (RunningSet, "resume", lambda running: None, "two choices", "nothing leads to an end"),
        (BlockManager, "first_missing", _from_the_first, "three", "blocks that it does not own alone"),
    ],
)
def test_what_holds_requests_or_shares_their_blocks_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[..., Any], case: str, finding: str
) -> None:
    monkeypatch.setattr(owner, name, change)
    with pytest.raises(Counterexample, match=finding):
        checked(case)


def test_a_reservation_that_finishes_before_its_transfer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSITIONS, (DecodePhase.RESERVED, DecodeMove.FINISH), DecodePhase.OVER)
    with pytest.raises(Counterexample, match="transfers run for"):
        checked("two choices")
