"""What the journal makes of events: what Redis, the spans and the record get."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.sampling import SamplingParams
from router_svc.records.events import (
    Admitted,
    BlocksReserved,
    Committed,
    DecodeStarted,
    Ended,
    Event,
    MigrationOutcome,
    MoveEnded,
    MoveStarted,
    Prefilled,
    Retried,
    TookOver,
    WorkerChosen,
)
from router_svc.records.journal import Journal
from router_svc.records.metrics import RouterMetrics
from router_svc.records.milestones import Milestone
from router_svc.records.record import Record
from router_svc.records.request_state import RequestProgress
from router_svc.records.spans import RequestTrace
from router_svc.request.stream import DeltaStream
from tests.support.spans import KeepingTracer
from tests.unit.router_svc.records.test_resumable import generation

D0, D1, P0 = (WorkerId(name) for name in ("decode-0", "decode-1", "prefill-0"))


class Stored:
    """In place of the store: the progress that it got, and the records."""

    def __init__(self) -> None:
        self.progress: list[RequestProgress] = []
        self.records: list[str] = []

    def put(self, progress: RequestProgress, record: str = "") -> None:
        self.progress.append(progress)
        if record:
            self.records.append(record)


class Setup:
    def __init__(self) -> None:
        self.now, self.stored, self.tracer = 0.0, Stored(), KeepingTracer()
        record = Record.new(generation(0, 0, sampling=SamplingParams()), accepted_at=100.0, clock=lambda: self.now)
        store: Any = self.stored
        trace = RequestTrace(tracer=self.tracer, parent=self.tracer.start(None))
        self.metrics = RouterMetrics(model_name="m")
        self.journal = Journal(record, self.metrics, store, trace)

    def happen(self, *events: Event) -> None:
        """One event each second."""
        for event in events:
            self.now += 1.0
            self.journal.append(event)

    def calls(self) -> list[tuple[str, float, float, str | None]]:
        """Worker, start, end and error of each call, in seconds since the request was accepted."""
        spans = [span for span in self.tracer.spans if span.name.startswith("call ")]
        return [
            (str(span.attributes["pdserve.worker"]), span.start - 100.0, span.end - 100.0, span.error) for span in spans
        ]


def chosen(worker: WorkerId, tier: str = "decode") -> WorkerChosen:
    return WorkerChosen(worker=worker, epoch=Epoch(1), tier=tier, why="idle")


def reserved(worker: WorkerId) -> BlocksReserved:
    return BlocksReserved(worker=worker, reserve_s=0.0)


def started(worker: WorkerId) -> DecodeStarted:
    return DecodeStarted(worker=worker, queue_s=0.0, is_prefilled_locally=False, cached_tokens=0, computing_s=0.0)


PREFILLED = Prefilled(cached_tokens=0, is_complete=False)
MOVE = MoveStarted(number=1, reason="drain", source=D0, target=D1, is_copied=True)
#: Until the sequences run on the first decode worker, after six seconds.
RUNNING = (Admitted(), chosen(D0), reserved(D0), chosen(P0, "prefill"), PREFILLED, started(D0))


def test_redis_gets_every_change_of_the_state_and_of_the_workers() -> None:
    """Fails if only states are stored: the trace of a router that is lost names the worker that a request has left."""
    setup = Setup()
    setup.happen(*RUNNING)
    assert [each.state for each in setup.stored.progress] == ["reserved", "prefilling", "decoding"]
    setup.happen(MOVE, chosen(D1), TookOver(), MoveEnded(number=1, outcome=MigrationOutcome.MOVED))
    assert [(each.state, each.decode_worker) for each in setup.stored.progress[3:]] == [("decoding", D1)]
    assert setup.stored.progress[-1].attempt == 1
    setup.happen(Ended.finished(["stop"]))
    assert len(setup.stored.records) == 1


def test_a_move_that_is_under_way_ends_with_the_request() -> None:
    setup = Setup()
    setup.happen(*RUNNING, MOVE, chosen(D1), Ended.ended_early(None))
    [move] = setup.journal.record.migrations
    assert (move.outcome, move.ended_at) == (MigrationOutcome.ENDED, 9.0)


def test_the_span_of_a_call_ends_when_the_request_has_left_the_worker() -> None:
    setup = Setup()
    setup.happen(*RUNNING, MOVE, chosen(D1), MoveEnded(number=1, outcome=MigrationOutcome.MOVED))
    setup.happen(Ended.finished(["stop"]))
    assert setup.calls() == [("decode-0", 2.0, 9.0, None), ("prefill-0", 4.0, 6.0, None), ("decode-1", 8.0, 10.0, None)]


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        (
            MoveEnded(number=1, outcome=MigrationOutcome.FAILED, error="full"),
            [("decode-0", 2.0, 10.0, None), ("decode-1", 8.0, 9.0, "failed")],
        ),
        (
            MoveEnded(number=1, outcome=MigrationOutcome.SOURCE_LOST, error="Lost decode-0"),
            [("decode-0", 2.0, 9.0, "source_lost"), ("decode-1", 8.0, 10.0, None)],
        ),
    ],
    ids=["failed", "source_lost"],
)
def test_the_span_of_a_call_says_that_its_worker_failed_in_a_move(end: MoveEnded, calls: list[Any]) -> None:
    setup = Setup()
    setup.happen(*RUNNING, MOVE, chosen(D1), end, Ended.finished(["stop"]))
    assert [call for call in setup.calls() if call[0] != "prefill-0"] == calls


def test_each_call_to_a_prefill_worker_ends_with_its_own_commit() -> None:
    """Fails if the first commit of the request ends them all: a second call would be over before it began."""
    setup = Setup()
    setup.happen(*RUNNING, Retried(reason="peer_lost", worker=D0, error="Lost"))
    setup.happen(chosen(D1), reserved(D1), chosen(P0, "prefill"), Committed(), started(D1), Ended.finished(["stop"]))
    assert [call[1:3] for call in setup.calls() if call[0] == "prefill-0"] == [(4.0, 6.0), (10.0, 11.0)]


def test_the_first_write_of_a_response_is_in_no_record_of_a_prompt_that_has_ended() -> None:
    """Fails if a prompt that failed before its sibling's first token is told of it: Redis has its record already."""
    failed, running = Setup(), Setup()
    failed.happen(Admitted(), Ended.ended_early(None))
    running.happen(*RUNNING)
    DeltaStream([running.journal, failed.journal], lambda _: None).first_write()
    assert [Milestone.FIRST_WRITE in each.journal.record.milestones for each in (running, failed)] == [True, False]
