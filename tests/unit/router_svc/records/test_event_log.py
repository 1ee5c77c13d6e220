"""The log of a request's events: what it keeps, what it counts, and when a view is computed."""

from __future__ import annotations

from pdserve.base.ids import WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import Admitted, FellBack, PrefillProgressed, TookOver


def fallback(number: int) -> FellBack:
    return FellBack(reason=str(number), worker=WorkerId("d"))


def test_the_first_and_the_last_events_of_a_kind_are_kept_in_order_and_all_are_counted() -> None:
    log = EventLog()
    for number in range(1000):
        log.append(fallback(number), at=float(number), attempt=1)
        log.append(PrefillProgressed(computing_s=0.0, cached_tokens=0, computed_tokens=number), at=0.0, attempt=1)
    half = FellBack.max_kept // 2
    expected = [*range(half), *range(1000 - half, 1000)]
    assert [int(event.reason) for _, event in log.of(FellBack)] == expected
    assert [logged.at for logged, _ in log.of(FellBack)] == expected
    assert log.num(FellBack) == 1000
    assert len([*log.of(PrefillProgressed)]) == PrefillProgressed.max_kept
    numbers = [logged.number for logged in log]
    assert numbers == sorted(numbers)
    assert log.total == 2000


def test_the_last_event_of_a_kind_is_found_among_others() -> None:
    log = EventLog()
    assert log.last(FellBack) is None
    for event in (fallback(1), fallback(2), Admitted()):
        log.append(event, at=0.0, attempt=1)
    assert log.last(FellBack) == fallback(2)


def test_a_view_is_computed_once_until_the_next_event_even_when_an_old_one_is_dropped() -> None:
    """Fails if a view is thought to be up to date because as many events are kept as before."""
    calls = []

    def last_reason(log: EventLog) -> str | None:
        calls.append(log.total)
        found = log.last(FellBack)
        return None if found is None else found.reason

    log = EventLog()
    for number in range(FellBack.max_kept):
        log.append(fallback(number), at=0.0, attempt=1)
    assert [log.view(last_reason), log.view(last_reason), len(calls)] == ["63", "63", 1]
    log.append(fallback(64), at=0.0, attempt=1)
    assert [log.view(last_reason), len(calls)] == ["64", 2]
    log.append(TookOver(), at=0.0, attempt=1)
    assert [log.view(last_reason), len(calls)] == ["64", 3]
