"""A decision record says which grammar a request had, and keeps nothing of the grammar itself."""

from __future__ import annotations

import json
from hashlib import sha256

from pdserve.base.sampling import SamplingParams
from router_svc.records.record import Record
from tests.unit.router_svc.records.test_resumable import generation


def record_of(grammar: str) -> Record:
    made = generation(0, 0, sampling=SamplingParams(grammar=grammar))
    return Record.new(made, accepted_at=0.0, clock=lambda: 0.0)


def test_the_digest_of_the_grammar_is_in_the_record_and_its_text_is_not() -> None:
    record = record_of("a secret of the tenant, ü")
    assert record.as_json()["grammar_sha256"] == sha256("a secret of the tenant, ü".encode()).hexdigest()
    assert "secret" not in json.dumps(record.as_json()) + json.dumps(record.summary(), default=str) + repr(record)


def test_a_request_without_a_grammar_has_no_digest() -> None:
    assert record_of("").as_json()["grammar_sha256"] is None
