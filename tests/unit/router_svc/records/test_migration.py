"""The moves of a request, of its events."""

from __future__ import annotations

import pytest

from pdserve.base.ids import WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import Event, MigrationOutcome, MoveEnded, MovePaused, MoveStarted, TookOver
from router_svc.records.migration import Migration, is_moving, migrations_of, open_move, taken_over


def start(number: int = 1) -> MoveStarted:
    return MoveStarted(number=number, reason="drain", source=WorkerId("d"), target=WorkerId("e"), is_copied=True)


def moved(number: int = 1) -> MoveEnded:
    return MoveEnded(number=number, outcome=MigrationOutcome.MOVED, sent_blocks=3)


def failed(number: int = 1) -> MoveEnded:
    return MoveEnded(number=number, outcome=MigrationOutcome.FAILED, sent_blocks=3)


def paused(number: int = 1, seconds: float = 0.5) -> MovePaused:
    return MovePaused(number=number, seconds=seconds)


def log_of(*events: Event) -> EventLog:
    log = EventLog()
    for number, event in enumerate(events):
        log.append(event, at=float(number), attempt=1)
    return log


@pytest.mark.parametrize(
    ("events", "is_open", "moves", "taking_over"),
    [
        ([], False, False, None),
        ([start()], True, True, None),
        ([start(), TookOver()], True, True, 1),
        ([start(), TookOver(), moved()], False, True, 1),
        ([start(), TookOver(), paused()], True, False, None),
        ([start(), TookOver(), moved(), paused()], False, False, None),
        ([start(), TookOver(), failed()], False, False, None),
        ([start(), failed(), start(2)], True, True, None),
        ([start(), failed(), start(2), TookOver()], True, True, 2),
    ],
    ids=str,
)
def test_a_move_is_open_until_its_end_and_lasts_until_the_first_tokens(
    events: list[Event], is_open: bool, moves: bool, taking_over: int | None
) -> None:
    log = log_of(*events)
    assert (open_move(log) is not None, is_moving(log), taken_over(log)) == (is_open, moves, taking_over)


def test_each_move_has_its_own_end_and_pause() -> None:
    first, second = migrations_of(log_of(start(), failed(), start(2), TookOver(), moved(2), paused(2)))
    common = {"reason": "drain", "source": WorkerId("d"), "target": WorkerId("e"), "is_copied": True, "sent_blocks": 3}
    assert first == Migration(at=0.0, ended_at=1.0, outcome=MigrationOutcome.FAILED, **common)  # type: ignore[arg-type]
    assert second == Migration(at=2.0, ended_at=4.0, outcome=MigrationOutcome.MOVED, pause_s=0.5, **common)  # type: ignore[arg-type]


def test_a_move_that_is_forgotten_leaves_its_end_and_its_pause_to_no_other() -> None:
    """Fails if an event belongs to the latest move before it that is left: every other move brings a pause here."""
    log = EventLog()
    for number in range(1, 201):
        log.append(start(number), at=0.0, attempt=1)
        log.append(moved(number), at=0.0, attempt=1)
        if number % 2:
            log.append(paused(number, float(number)), at=0.0, attempt=1)
    found = migrations_of(log)
    numbers = [*range(1, 33), *range(169, 201)]
    assert [each.pause_s for each in found] == [float(number) if number % 2 else None for number in numbers]
    assert all(each.outcome is MigrationOutcome.MOVED for each in found)
