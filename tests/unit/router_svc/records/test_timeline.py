"""A request is in one phase at any time, whatever is reported and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import Admitted, DecodeStarted, Event, FirstDecoded, Retried
from router_svc.records.timeline import Phase, Timeline, timeline_of

PHASES = st.sampled_from(Phase)
#: Seconds until the next report, how far it reaches back, and the phase it reports; None for a retry.
REPORTS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.none() | PHASES), max_size=20)


@given(REPORTS, st.floats(0, 10))
def test_phases_add_up_to_the_latency_and_none_is_negative(
    reports: list[tuple[float, float, Phase | None]], rest_s: float
) -> None:
    timeline, now = Timeline(), 0.0
    for after_s, ago_s, phase in reports:
        now += after_s
        if phase is None:
            timeline.restart(now)
        else:
            timeline.enter(phase, now - ago_s)
    seconds = timeline.seconds(now + rest_s)
    assert sum(seconds.values()) == pytest.approx(now + rest_s)
    assert min(seconds.values()) >= 0.0
    starts = [start.at for start in timeline.starts]
    assert starts == sorted(starts)


@pytest.mark.parametrize(("reported_at", "wire_s"), [(6.0, 0.0), (4.5, 0.5)])
def test_an_earlier_phase_that_is_reported_late_stands_before_the_later_one(reported_at: float, wire_s: float) -> None:
    """The decode worker's report can arrive before the prefill worker's first token."""
    timeline = Timeline()
    timeline.enter(Phase.RESERVE, 1.0)
    timeline.enter(Phase.PREFILL, 2.0)
    timeline.enter(Phase.DECODE, 5.0)
    timeline.enter(Phase.WIRE, reported_at)
    timeline.enter(Phase.PREFILL, 7.0)
    assert [start.phase for start in timeline.starts] == list(Phase)
    expected = {"queue": 1.0, "reserve": 1.0, "prefill": 3.0 - wire_s, "wire": wire_s, "decode": 4.0}
    assert timeline.seconds(9.0) == expected


def test_a_late_report_does_not_reach_into_the_attempt_before() -> None:
    timeline = Timeline()
    timeline.enter(Phase.DECODE, 2.0)
    timeline.restart(4.0)
    timeline.enter(Phase.DECODE, 6.0)
    timeline.enter(Phase.WIRE, 5.0)
    assert [start.phase for start in timeline.starts] == ["queue", "decode", "reserve", "wire", "decode"]
    assert timeline.seconds(7.0) == {"queue": 2.0, "reserve": 1.0, "prefill": 0.0, "wire": 1.0, "decode": 3.0}


def test_a_retry_waits_for_a_decode_worker_again_and_what_was_lost_stays_counted() -> None:
    timeline = Timeline()
    timeline.enter(Phase.PREFILL, 1.0)
    timeline.restart(4.0)
    timeline.enter(Phase.PREFILL, 4.5)
    timeline.enter(Phase.DECODE, 6.0)
    assert timeline.seconds(6.0) == {"queue": 1.0, "reserve": 0.5, "prefill": 4.5, "wire": 0.0, "decode": 0.0}


def test_a_duration_that_reaches_back_too_far_is_cut() -> None:
    timeline = Timeline()
    timeline.enter(Phase.WIRE, 3.0)
    timeline.enter(Phase.DECODE, 2.0)
    assert timeline.seconds(4.0) == {"queue": 3.0, "reserve": 0.0, "prefill": 0.0, "wire": 0.0, "decode": 1.0}


def test_the_tokens_behind_a_retry_are_decoded_even_if_the_prompt_is_computed_where_they_are() -> None:
    """Fails if only the first attempt of a request reports its tokens: those of the second would count as prefill."""
    log, worker = EventLog(), WorkerId("d")
    started = DecodeStarted(worker=worker, queue_s=0.0, is_prefilled_locally=True, cached_tokens=0, computing_s=0.5)
    events: list[tuple[float, Event]] = [
        (1.0, Admitted()),
        (2.0, started),
        (3.0, FirstDecoded()),
        (5.0, Retried(reason="peer_lost", worker=worker, error="Lost")),
        (6.5, started),
        (7.0, FirstDecoded()),
    ]
    for at, event in events:
        log.append(event, at=at, attempt=1)
    expected = {"queue": 1.0, "reserve": 1.5, "prefill": 2.5, "wire": 0.0, "decode": 5.0}
    assert timeline_of(log).seconds(10.0) == expected
