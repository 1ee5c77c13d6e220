"""`pdserve trace`: the waterfall of a request and the rest of its page."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from pdserve.cli.__main__ import main
from pdserve.cli.trace_view import RequestTrace, Span, bar, render, spans_of
from router_svc.records.milestones import Milestone
from tests.unit.cli.fake_router import FakeRouter, running

TRACE: dict[str, Any] = {
    "request_id": "cmpl-1",
    "endpoint": "/v1/completions",
    "prompt_tokens": 300,
    "n": 1,
    "state": "finished",
    "attempt": 2,
    "outcome": {"finish_reasons": ["stop"], "error": None, "completion_tokens": 11, "cached_tokens": 288},
    "phases": {
        "admitted": 0.001,
        "reserved": 0.004,
        "prefill_start": 0.006,
        "first_token": 0.080,
        "first_write": 0.081,
        "commit": 0.085,
        "first_decode": 0.090,
        "finish": 0.181,
    },
    "chunks": [{"at": 0.03, "computed_tokens": 256}],
    "decisions": [{"at": 0.002, "attempt": 1, "tier": "decode", "worker": "decode-0", "epoch": 7, "why": "overlap"}],
    "retries": [{"at": 0.05, "attempt": 1, "reason": "peer_lost", "worker": "prefill-0", "error": "Lost it"}],
    "migrations": [
        {
            "at": 0.07,
            "reason": "drain",
            "source": "decode-0",
            "target": "decode-1",
            "outcome": "moved",
            "sent_blocks": 9,
            "pause_s": 0.0125,
        }
    ],
    "pauses": [{"at": 0.05, "seconds": 0.0712, "completion_tokens": 9, "reason": "peer_lost"}],
    "fallbacks": [{"at": 0.06, "attempt": 2, "reason": "prefill_lost", "worker": "decode-0", "error": None}],
    "prefilled_by": "prefill",
    "reported": {"transfer_s": 0.003, "sent_bytes": 1234567},
}


def text_of(trace: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(RequestTrace.model_validate(trace), width=width))
    return capture.get()


def test_the_page_says_which_grammar_the_output_has_to_match() -> None:
    assert "grammar" not in text_of(TRACE)
    assert f"grammar {'ab' * 32}" in text_of(TRACE | {"grammar_sha256": "ab" * 32})


def test_without_retries_the_bars_follow_each_other() -> None:
    spans = {span.name: (span.start_s, span.end_s) for span in spans_of(TRACE["phases"])}
    assert spans == {
        "queue": (0.0, 0.001),
        "reserve": (0.001, 0.004),
        "dispatch": (0.004, 0.006),
        "prefill": (0.006, 0.080),
        "first write": (0.080, 0.081),
        "commit": (0.080, 0.085),
        "first decode": (0.085, 0.090),
        "decode": (0.090, 0.181),
    }


def test_every_phase_of_the_router_ends_a_bar() -> None:
    phases = {phase.value: 1.0 + index for index, phase in enumerate(Milestone)}
    assert sorted(span.end_s for span in spans_of(phases)) == sorted(phases.values())


def test_a_bar_without_a_known_start_starts_with_the_preceding_phase() -> None:
    phases = {"admitted": 0.1, "reserved": 0.2, "first_token": 0.5, "finish": 0.9}
    names = {span.name: (span.start_s, span.end_s) for span in spans_of(phases)}
    assert names["prefill"] == (0.2, 0.5)
    assert names["decode"] == (0.5, 0.9)


def test_a_request_served_by_decode_alone_has_no_bar_for_its_reservation() -> None:
    phases = {"admitted": 0.1, "reserved": 0.4, "first_token": 0.5, "first_write": 0.5, "finish": 0.9}
    names = {span.name: (span.start_s, span.end_s) for span in spans_of(phases, prefilled_by="decode")}
    assert names == {
        "queue": (0, 0.1),
        "local prefill": (0.1, 0.5),
        "first write": (0.5, 0.5),
        "decode": (0.5, 0.9),
    }


def test_a_request_that_fell_back_to_decode_keeps_the_bars_of_the_handover() -> None:
    phases = {"admitted": 0.1, "reserved": 0.2, "prefill_start": 0.3, "first_token": 0.8, "finish": 0.9}
    assert {"reserve", "dispatch"} <= {span.name for span in spans_of(phases, prefilled_by="decode")}


def test_a_request_that_failed_early_shows_the_time_until_its_end() -> None:
    assert spans_of({"admitted": 0.1, "finish": 0.5})[-1] == Span(name="until the end", start_s=0.1, end_s=0.5)
    assert spans_of({"finish": 0.5}) == [Span(name="until the end", start_s=0.0, end_s=0.5)]


def test_a_request_that_has_just_started_has_no_bars() -> None:
    assert spans_of({}) == []
    assert "queued" in text_of({"request_id": "a", "state": "queued"})


def test_a_phase_earlier_than_its_predecessor_has_no_negative_length() -> None:
    spans = spans_of({"prefill_start": 0.9, "first_token": 0.5})
    assert all(span.duration_s >= 0 for span in spans)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 1), (1, 1), (0.5, 0.5001), (0.999, 1)])
def test_a_bar_is_visible_and_stays_within_its_row(start: float, end: float) -> None:
    rendered = bar(Span(name="a", start_s=start, end_s=end), 1.0, 20)
    assert "█" in rendered
    assert len(rendered) <= 20


def test_bars_are_proportional_to_durations() -> None:
    assert bar(Span(name="a", start_s=0.5, end_s=0.75), 1.0, 20) == " " * 10 + "█" * 5


def test_the_page_shows_figures_decisions_retries_and_fallbacks_in_order() -> None:
    text = text_of(TRACE)
    assert "cmpl-1  /v1/completions  finished (stop)  attempt 2" in text
    assert "300 prompt tokens (288 cached) -> 11 tokens" in text
    for figure in ("TTFT 81.0 ms", "handover gap 10.0 ms", "TPOT 10.0 ms", "total 181.0 ms"):
        assert figure in text
    words = [
        "decode on decode-0",
        "retry: peer_lost",
        "fallback: prefill_lost",
        "move: drain",
    ]
    assert sorted(words, key=text.index) == words
    assert "decode-0 -> decode-1: moved, 9 blocks copied, pause 12.5 ms" in text_of(TRACE, 200)

    [line] = [line for line in text_of(TRACE, 200).splitlines() if "pause: peer_lost" in line]
    assert "71.2 ms behind 9 tokens" in line
    assert "1,234,567" in text
    assert "256 at 30.0 ms" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_of_the_waterfall_is_wider_than_the_terminal(width: int) -> None:
    rows = [line for line in text_of(TRACE, width).splitlines() if "█" in line]
    assert len(rows) == 8
    assert all(len(row) <= width for row in rows)


def test_the_command_prints_the_routers_answer_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter({"/v1/requests/cmpl-1/trace": (200, TRACE)})) as router:
        assert main(["trace", "cmpl-1", "--base-url", router.base_url]) == 0
        assert "cmpl-1" in capsys.readouterr().out
        assert main(["trace", "--json", "cmpl-1", "--base-url", router.base_url]) == 0
        assert '"handover' not in capsys.readouterr().out


def test_an_unknown_request_is_reported_with_the_routers_message(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter()) as router:
        assert main(["trace", "a/b", "--base-url", router.base_url]) == 1
    assert capsys.readouterr().err == "error: There is no /v1/requests/a%2Fb/trace.\n"


def test_a_missing_request_id_is_reported_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace"]) == 1
    assert "No request id given." in capsys.readouterr().err


def test_a_local_prefill_is_named_with_its_reason() -> None:
    assert "prefilled by the decode worker" not in text_of(TRACE)
    local = text_of({**TRACE, "prefilled_by": "decode", "local_prefill_reason": "no_prefill_tier"})
    assert "prefilled by the decode worker (no prefill tier)" in local
