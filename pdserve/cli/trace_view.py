"""Renders a request's decision record: a waterfall of its phases, and its decisions, retries and fallbacks.

The record's fields are described in `router_svc.records.record_json`. Times are seconds since the router accepted the
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_NAME_CELLS, _TIME_CELLS = 14, 11
_MIN_BAR_CELLS = 10


class OutcomeView(BaseModel):
    """Outcome of the request so far."""

    finish_reasons: list[str] = []
    error: str | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0


class PrefillProgress(BaseModel):
    """Prompt tokens that the prefill worker had computed at a time."""

    at: float
    computed_tokens: int


class WorkerChoice(BaseModel):
    """The choice of a worker, and the reason."""

    at: float
    attempt: int
    tier: str
    worker: str
    epoch: int
    why: str


class Incident(BaseModel):
    """A retry or a fallback."""

    at: float
    attempt: int
    reason: str
    worker: str | None = None
    error: str | None = None


class Move(BaseModel):
    """A move from one decode worker to another."""

    at: float
    reason: str
    source: str
    target: str
    is_copied: bool = True
    outcome: str | None = None
    sent_blocks: int = 0
    pause_s: float | None = None
    error: str | None = None


class Pause(BaseModel):
    """A pause in the output."""

    at: float
    seconds: float
    completion_tokens: int = 0
    reason: str = ""


class RequestTrace(BaseModel):
    """The answer of `GET /v1/requests/{id}/trace`."""

    request_id: str
    endpoint: str = ""
    prompt_tokens: int = 0
    n: int = 1
    state: str
    attempt: int = 1
    outcome: OutcomeView = OutcomeView()
    phases: dict[str, float] = {}
    chunks: list[PrefillProgress] = []
    decisions: list[WorkerChoice] = []
    retries: list[Incident] = []
    fallbacks: list[Incident] = []
    migrations: list[Move] = []
    pauses: list[Pause] = []
    #: With those that the lists leave out.
    counts: dict[str, int] = {}
    prefilled_by: str | None = None
    local_prefill_reason: str | None = None
    grammar_sha256: str | None = None
    resumed_tokens: int | None = None
    reported: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One bar of the waterfall, in seconds since the request was accepted."""

    name: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length of the bar in seconds."""
        return self.end_s - self.start_s


#: Name of each bar, phases it may start with (the first one that happened counts; "" is the request's start), its end.
_SPANS = (
    ("queue", ("",), "admitted"),
    ("reserve", ("admitted",), "reserved"),
    ("dispatch", ("reserved",), "prefill_start"),
    ("prefill", ("prefill_start", "reserved", "admitted"), "first_token"),
    ("first write", ("first_token",), "first_write"),
    ("commit", ("first_token",), "commit"),
    ("first decode", ("commit", "first_token"), "first_decode"),
    ("decode", ("first_decode", "first_token"), "finish"),
)


#: The bars when the decode worker did everything: it answers the reservation with the first token.
_LOCAL_SPANS = (
    ("queue", ("",), "admitted"),
    ("local prefill", ("admitted",), "first_token"),
    ("first write", ("first_token",), "first_write"),
    ("decode", ("first_token",), "finish"),
)


def spans_of(phases: Mapping[str, float], *, prefilled_by: str | None = None) -> list[Span]:
    """Bars of the phases that have happened, in the order of a request without retries."""
    known = {"": 0.0, **phases}
    spans = []
    for name, starts, end in _LOCAL_SPANS if prefilled_by == "decode" and "prefill_start" not in phases else _SPANS:
        start_s = next((known[phase] for phase in starts if phase in known), None)
        if start_s is not None and end in known:
            # After a retry, a phase may keep its first time, which can precede the phase it usually follows.
            spans.append(Span(name=name, start_s=min(start_s, known[end]), end_s=known[end]))
    if "finish" in known and not any(span.name == "decode" for span in spans):
        last = max(at for phase, at in known.items() if phase != "finish")
        spans.append(Span(name="until the end", start_s=min(last, known["finish"]), end_s=known["finish"]))
    return spans


def bar(span: Span, total_s: float, cells: int) -> str:
    """Renders the bar in a row of `cells`: at least one cell long, never beyond the row."""
    scale = cells / total_s if total_s > 0 else 0.0
    start = min(int(span.start_s * scale), cells - 1)
    length = max(1, min(round(span.duration_s * scale), cells - start))
    return " " * start + "█" * length


def render(trace: RequestTrace, *, width: int) -> RenderableType:
    """The whole page, for a terminal of `width` cells."""
    sections: list[RenderableType] = [*_headline(trace), Text(), *_waterfall(trace, width)]
    if trace.chunks:
        steps = ", ".join(f"{chunk.computed_tokens} at {_milliseconds(chunk.at)}" for chunk in trace.chunks[-8:])
        sections.append(Text(f"prompt tokens computed: {steps}", style="dim"))
    if trace.reported:
        sections += [Text(), Text("measured by the workers", style="bold"), _reported(trace.reported)]
    if trace.decisions or trace.retries or trace.fallbacks:
        sections += [Text(), Text("decisions", style="bold"), _decisions(trace), *_left_out(trace)]
    return Group(*sections)


def _headline(trace: RequestTrace) -> list[Text]:
    outcome = trace.outcome
    style = {"finished": "green", "failed": "red", "cancelled": "yellow"}.get(trace.state, "cyan")
    first = Text.assemble((trace.request_id, "bold"), f"  {trace.endpoint}  ", (trace.state, style))
    if outcome.finish_reasons:
        first.append(f" ({', '.join(outcome.finish_reasons)})")
    first.append(f"  attempt {trace.attempt}" if trace.attempt > 1 else "")
    second = f"{trace.prompt_tokens} prompt tokens ({outcome.cached_tokens} cached)"
    second += f" -> {outcome.completion_tokens} tokens" + (f" in {trace.n} choices" if trace.n > 1 else "")
    if trace.local_prefill_reason:
        second += f", prefilled by the decode worker ({trace.local_prefill_reason.replace('_', ' ')})"
    if trace.resumed_tokens is not None:
        second += f", resumed behind {trace.resumed_tokens} tokens of another router"
    lines = [first, Text(second), Text("   ".join(f"{name} {value}" for name, value in _figures(trace)))]
    if trace.grammar_sha256:
        lines.append(Text(f"grammar {trace.grammar_sha256}", style="dim"))
    if outcome.error:
        lines.append(Text(outcome.error, style="red"))
    return lines


def _figures(trace: RequestTrace) -> list[tuple[str, str]]:
    """TTFT, handover gap, TPOT and total time, as far as they are known."""
    phases = trace.phases
    figures = []
    first_write = phases.get("first_write", phases.get("first_token"))
    if first_write is not None:
        figures.append(("TTFT", _milliseconds(first_write)))
    if trace.prefilled_by == "prefill" and {"first_token", "first_decode"} <= phases.keys():
        figures.append(("handover gap", _milliseconds(max(phases["first_decode"] - phases["first_token"], 0.0))))
    each = trace.outcome.completion_tokens / max(trace.n, 1)
    if first_write is not None and "finish" in phases and each > 1:
        figures.append(("TPOT", _milliseconds((phases["finish"] - first_write) / (each - 1))))
    if "finish" in phases:
        figures.append(("total", _milliseconds(phases["finish"])))
    return figures


def _waterfall(trace: RequestTrace, width: int) -> list[Text]:
    spans = spans_of(trace.phases, prefilled_by=trace.prefilled_by)
    total_s = max((span.end_s for span in spans), default=0.0)
    cells = max(_MIN_BAR_CELLS, width - _NAME_CELLS - _TIME_CELLS - 2)
    lines = []
    for span in spans:
        line = Text(f"{span.name:<{_NAME_CELLS}}{_milliseconds(span.duration_s):>{_TIME_CELLS}}  ", no_wrap=True)
        line.append(bar(span, total_s, cells), style=_style(span.name))
        lines.append(line)
    return lines


def _style(name: str) -> str:
    return {
        "prefill": "blue",
        "local prefill": "blue",
        "decode": "green",
        "first decode": "magenta",
        "commit": "magenta",
    }.get(name, "yellow")


def _reported(reported: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in reported.items():
        in_seconds = name.endswith("_s")
        table.add_row(f"  {name.removesuffix('_s')}", _milliseconds(value) if in_seconds else f"{value:,.0f}")
    return table


def _decisions(trace: RequestTrace) -> Table:
    """Decisions, retries and fallbacks in one list, ordered by time."""
    rows = [(each.at, each.attempt, f"{each.tier} on {each.worker}", each.why, "") for each in trace.decisions] + [
        (each.at, each.attempt, f"{kind}: {each.reason}", " ".join(filter(None, (each.worker, each.error))), "yellow")
        for kind, incidents in (("retry", trace.retries), ("fallback", trace.fallbacks))
        for each in incidents
    ]
    rows += [(each.at, trace.attempt, f"move: {each.reason}", _move(each), "yellow") for each in trace.migrations]
    rows += [
        (
            each.at,
            trace.attempt,
            f"pause: {each.reason}",
            f"{_milliseconds(each.seconds)} behind {each.completion_tokens:,} tokens",
            "yellow",
        )
        for each in trace.pauses
    ]
    table = Table.grid(padding=(0, 2))
    for at, attempt, what, why, style in sorted(rows, key=lambda row: row[0]):
        table.add_row(f"  {_milliseconds(at)}", f"attempt {attempt}", Text(what, style=style), Text(why, style=style))
    return table


def _left_out(trace: RequestTrace) -> list[Text]:
    """What of a long record is not listed."""
    listed = {
        "decisions": len(trace.decisions),
        "retries": len(trace.retries),
        "fallbacks": len(trace.fallbacks),
        "migrations": len(trace.migrations),
    }
    more = [f"{trace.counts[name] - count:,} {name}" for name, count in listed.items() if name in trace.counts]
    more = [each for each in more if not each.startswith("0 ")]
    return [Text(f"  not listed, in between: {', '.join(more)}", style="dim")] if more else []


def _move(move: Move) -> str:
    how = f"{move.sent_blocks} blocks copied" if move.is_copied else "computed again"
    pause = "" if move.pause_s is None else f", pause {_milliseconds(move.pause_s)}"
    what = f"{move.source} -> {move.target}: {move.outcome or 'under way'}, {how}{pause}"
    return what if move.error is None else f"{what}. {move.error}"


def _milliseconds(seconds: float) -> str:
    """Formats a duration, such as `0.42 ms`, `12.3 ms` or `1,234 ms`."""
    value = seconds * 1000
    if round(value, 2) < 10:
        return f"{value:.2f} ms"
    return f"{value:.1f} ms" if round(value, 1) < 1000 else f"{value:,.0f} ms"
