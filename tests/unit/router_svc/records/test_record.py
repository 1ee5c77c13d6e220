"""What a decision record says, and what it does not keep."""

from __future__ import annotations

import json
from hashlib import sha256

from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.sampling import SamplingParams
from router_svc.records.events import FellBack, Retried, WorkerChosen
from router_svc.records.record import Record
from router_svc.records.record_json import as_json, log_fields_of
from tests.unit.router_svc.records.test_resumable import generation


def record_of(grammar: str) -> Record:
    made = generation(0, 0, sampling=SamplingParams(grammar=grammar))
    return Record.new(made, accepted_at=0.0, clock=lambda: 0.0)


def test_the_digest_of_the_grammar_is_in_the_record_and_its_text_is_not() -> None:
    record = record_of("a secret of the tenant, ü")
    assert as_json(record)["grammar_sha256"] == sha256("a secret of the tenant, ü".encode()).hexdigest()
    assert "secret" not in json.dumps(as_json(record)) + json.dumps(log_fields_of(record), default=str) + repr(record)


def test_a_request_that_is_tried_again_and_again_has_a_bounded_record() -> None:
    """Fails when retries, decisions and moves add up until the deadline, an hour later."""
    record = record_of("")
    worker = WorkerId("decode-0")
    for _ in range(1000):
        for event in (
            WorkerChosen(worker=worker, epoch=Epoch(1), tier="decode", why="why"),
            FellBack(reason="peer_lost", worker=worker),
            Retried(reason="peer_lost", worker=worker, error="Lost"),
        ):
            record.append(event, at=0.0)
    shown = as_json(record)
    for name in ("decisions", "retries", "fallbacks"):
        entries = shown[name]
        assert isinstance(entries, list)
        assert [entry["attempt"] for entry in entries] == [*range(1, 33), *range(969, 1001)]  # type: ignore[index, call-overload]
    assert shown["attempt"] == 1001
    assert shown["counts"] == {"decisions": 1000, "retries": 1000, "fallbacks": 1000, "migrations": 0}


def test_a_request_without_a_grammar_has_no_digest() -> None:
    assert as_json(record_of(""))["grammar_sha256"] is None
