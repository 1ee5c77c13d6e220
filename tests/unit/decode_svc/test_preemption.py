"""When blocks run out, the youngest sequence gives its blocks back and later computes them again."""

from __future__ import annotations

from dataclasses import replace

from pdserve.base.sampling import SamplingParams
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, C, decode, job, oracle


def test_the_youngest_is_preempted_and_later_continues_with_the_same_tokens() -> None:
    worker = decode(8)
    params = replace(GREEDY, max_tokens=16)
    prompts = {A: PROMPT, B: [3, *PROMPT[:7]]}
    for name, prompt in prompts.items():
        worker.scheduler.reserve(job(name, prompt, params, threshold=ALWAYS))
    preempted = [each.request_id for events in worker.run() for each in events.preempted]
    assert preempted
    assert set(preempted) == {B}
    assert worker.scheduler.load().num_preemptions == len(preempted)
    for name, prompt in prompts.items():
        assert worker.tokens(name) == oracle(prompt, params)
    assert worker.all_free


def test_choices_of_one_request_are_preempted_one_by_one() -> None:
    worker = decode(8)
    params = SamplingParams(n=3, seed=2, max_tokens=14, ignore_eos=True)
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=ALWAYS))
    events = worker.run()
    assert sum(len(event.preempted) for event in events) > 0
    for choice in range(3):
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)


def test_a_resumed_sequence_finds_its_own_blocks_in_the_cache() -> None:
    worker = decode(8)
    params = replace(GREEDY, max_tokens=16)
    worker.scheduler.reserve(job(A, PROMPT, replace(params, max_tokens=12), threshold=ALWAYS))
    worker.scheduler.reserve(job(B, [3, *PROMPT[:7]], params, threshold=ALWAYS))
    resumed = []
    while worker.scheduler.has_work():
        worker.step()
        resumed += [c.start for c in worker.plans[-1].chunks if c.sequence.num_output > 1 and c.stop - c.start > 1]
    assert any(start > 0 for start in resumed)


def test_no_request_is_admitted_while_a_preempted_sequence_waits() -> None:
    worker = decode(6, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT, replace(GREEDY, max_tokens=13), threshold=ALWAYS))
    worker.step()
    worker.scheduler.reserve(job(B, [5] * 5))
    assert worker.grant(B)
    worker.scheduler.reserve(job(C, [6]))
    while not worker.step().preempted:
        assert worker.scheduler.has_work()
    # A was preempted in favour of B's transfer. When B's blocks come free, A is resumed before C is admitted.
    worker.run()
    worker.scheduler.abort(B)
    assert worker.step().grants == ()
    assert [sequence.request_id for sequence in worker.plans[-1].scheduled()] == [A]
    granted = [grant.request_id for events in worker.run() for grant in events.grants]
    assert worker.tokens(A) == oracle(PROMPT, replace(GREEDY, max_tokens=13))
    assert granted == [C]


def test_each_event_carries_its_attempt() -> None:
    """Fails when an event could reach another attempt of its request."""
    worker, attempts = decode(8), {A: 3, B: 4}
    for (name, attempt), prompt in zip(attempts.items(), (PROMPT, [3, *PROMPT[:7]]), strict=True):
        waiting = job(name, prompt, replace(GREEDY, max_tokens=16), threshold=ALWAYS)
        worker.scheduler.reserve(replace(waiting, attempt=attempt))
    seen = worker.run()
    for kind in ("started", "progress", "tokens"):
        found = [each for events in seen for each in getattr(events, kind)]
        assert {(each.request_id, each.attempt) for each in found} == {*attempts.items()}, kind
    assert {each for events in seen for each in events.finished} == {*attempts.items()}
    assert {each for events in seen for each in events.preempted} == {(B, 4)}
