"""What a decision record says, and what it does not keep."""

from __future__ import annotations

import json
from hashlib import sha256

from pdserve.base.sampling import SamplingParams
from router_svc.records.entries import MAX_ENTRIES
from router_svc.records.record import Record
from tests.support.records import worker_record
from tests.unit.router_svc.records.test_resumable import generation


def record_of(grammar: str) -> Record:
    made = generation(0, 0, sampling=SamplingParams(grammar=grammar))
    return Record.new(made, accepted_at=0.0, clock=lambda: 0.0)


def test_the_digest_of_the_grammar_is_in_the_record_and_its_text_is_not() -> None:
    record = record_of("a secret of the tenant, ü")
    assert record.as_json()["grammar_sha256"] == sha256("a secret of the tenant, ü".encode()).hexdigest()
    assert "secret" not in json.dumps(record.as_json()) + json.dumps(record.summary(), default=str) + repr(record)


def test_a_request_that_is_tried_again_and_again_has_a_bounded_record() -> None:
    """Fails when retries, decisions and moves add up until the deadline, an hour later."""
    record = record_of("")
    for _ in range(1000):
        record.add_decision(worker_record("decode-0"), "why")
        for incidents in (record.retries, record.fallbacks):
            incidents.append(record.incident("peer_lost", None, None))
    shown = record.as_json()
    for name in ("decisions", "retries", "fallbacks"):
        entries = shown[name]
        assert isinstance(entries, list)
        assert len(entries) == MAX_ENTRIES
    assert shown["counts"] == {"decisions": 1000, "retries": 1000, "fallbacks": 1000, "migrations": 0}


def test_a_request_without_a_grammar_has_no_digest() -> None:
    assert record_of("").as_json()["grammar_sha256"] is None
