"""A grammar that takes long delays its own output, and no other."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import replace

import pytest

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine import mask_threads
from pdserve.engine.sequence import Fault
from pdserve.model.grammar import TokenBits
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, DecodeWorker, decode, job
from tests.unit.engine.fakes import expected, limits
from tests.unit.engine.late_grammar import LateGrammar

LONG = replace(GREEDY, max_tokens=12)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "_PATIENCE_S", 0.001)


def start(worker: DecodeWorker, request_id: RequestId, grammar: LateGrammar | None, params: SamplingParams) -> None:
    if grammar is not None:
        params = replace(params, grammar="late")
    read = None if grammar is None else grammar.as_grammar()
    worker.scheduler.reserve(replace(job(request_id, PROMPT, params, threshold=ALWAYS), grammar=read))


def run_until(worker: DecodeWorker, request_id: RequestId, tokens: int) -> None:
    while len(worker.tokens(request_id)) < tokens:
        worker.step()


def found(worker: DecodeWorker, grammar: LateGrammar) -> None:
    """Lets the thread find what it looks for."""
    while not grammar.is_looking.is_set():
        worker.step()
    grammar.finds.set()


@pytest.mark.parametrize("params", [LONG, replace(LONG, temperature=1.0, seed=4)])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_output_waits_while_another_goes_on(params: SamplingParams, at: int) -> None:
    """`at`: tokens behind which it takes long, the first of which is sampled from the prompt's last chunk."""
    worker, grammar = decode(40), LateGrammar()
    grammar.finds.set()
    start(worker, A, grammar, params)
    run_until(worker, A, at)
    grammar.finds.clear()
    start(worker, B, None, LONG)
    run_until(worker, B, 12)
    late = worker.tokens(A)
    assert len(late) <= at + 1
    found(worker, grammar)
    worker.run()
    assert worker.tokens(A) == expected(PROMPT, params, 0, limits())
    assert worker.tokens(B) == expected(PROMPT, LONG, 0, limits())
    assert worker.all_free


def test_a_late_output_that_ends_leaves_nothing() -> None:
    worker, grammar = decode(40), LateGrammar()
    start(worker, A, grammar, LONG)
    for _ in range(4):
        worker.step()
    assert worker.scheduler.abort(A)
    grammar.finds.set()
    worker.run()
    assert worker.tokens(A) == []
    assert worker.all_free


def test_what_was_preempted_while_it_waited_is_computed_again() -> None:
    worker, grammar = decode(10), LateGrammar()
    grammar.finds.set()
    start(worker, B, None, replace(GREEDY, max_tokens=30))
    start(worker, A, grammar, replace(GREEDY, max_tokens=20))
    run_until(worker, A, 3)
    grammar.finds.clear()
    run_until(worker, B, 30)
    found(worker, grammar)
    worker.run()
    assert worker.scheduler.load().num_preemptions
    assert worker.tokens(A) == expected(PROMPT, replace(GREEDY, max_tokens=20), 0, limits())
    assert worker.all_free


class BrokenGrammar(LateGrammar):
    """Fails wherever it is followed."""

    def find(self, tokens: array[int], num_prompt: int) -> None:
        raise ValueError("no mask")

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits | None:
        raise ValueError("no mask")


def test_a_failure_on_another_thread_ends_its_request_alone() -> None:
    worker = decode(40)
    start(worker, A, BrokenGrammar(), LONG)
    start(worker, B, None, LONG)
    worker.run()
    failures = [failure for events in worker.seen for failure in events.failures]
    assert [(each.request_id, each.fault) for each in failures] == [(A, Fault.PREPARATION)]
    assert "ValueError" in str(failures[0].error)
    assert worker.tokens(B) == expected(PROMPT, LONG, 0, limits())
    assert worker.all_free
