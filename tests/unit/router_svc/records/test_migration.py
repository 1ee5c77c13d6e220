"""The moves of a request, of its events."""

from __future__ import annotations

import pytest

from pdserve.base.ids import WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import Event, MigrationOutcome, MoveEnded, MovePaused, MoveStarted, TookOver
from router_svc.records.migration import Migration, awaits_first_tokens, is_moving, migrations_of, open_move

START = MoveStarted(reason="drain", source=WorkerId("d"), target=WorkerId("e"), is_copied=True)
MOVED, FAILED = (
    MoveEnded(outcome=outcome, sent_blocks=3) for outcome in (MigrationOutcome.MOVED, MigrationOutcome.FAILED)
)
PAUSED = MovePaused(seconds=0.5)


def log_of(*events: Event) -> EventLog:
    log = EventLog()
    for number, event in enumerate(events):
        log.append(event, at=float(number), attempt=1)
    return log


@pytest.mark.parametrize(
    ("events", "is_open", "moves", "awaits"),
    [
        ([], False, False, False),
        ([START], True, True, False),
        ([START, TookOver()], True, True, True),
        ([START, TookOver(), MOVED], False, True, True),
        ([START, TookOver(), PAUSED], True, False, False),
        ([START, TookOver(), MOVED, PAUSED], False, False, False),
        ([START, TookOver(), FAILED], False, False, False),
        ([START, FAILED, START], True, True, False),
    ],
    ids=str,
)
def test_a_move_is_open_until_its_end_and_lasts_until_the_first_tokens(
    events: list[Event], is_open: bool, moves: bool, awaits: bool
) -> None:
    log = log_of(*events)
    assert (open_move(log) is not None, is_moving(log), awaits_first_tokens(log)) == (is_open, moves, awaits)


def test_each_move_has_its_own_end_and_pause() -> None:
    first, second = migrations_of(log_of(START, FAILED, START, TookOver(), MOVED, PAUSED))
    common = {"reason": "drain", "source": WorkerId("d"), "target": WorkerId("e"), "is_copied": True, "sent_blocks": 3}
    assert first == Migration(at=0.0, ended_at=1.0, outcome=MigrationOutcome.FAILED, **common)  # type: ignore[arg-type]
    assert second == Migration(at=2.0, ended_at=4.0, outcome=MigrationOutcome.MOVED, pause_s=0.5, **common)  # type: ignore[arg-type]
