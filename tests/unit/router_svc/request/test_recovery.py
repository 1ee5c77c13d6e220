"""The recovery policy as tables: every failure at every point of the output."""

from __future__ import annotations

import itertools

import pytest

from pdserve.base.errors import (
    DigestMismatch,
    Draining,
    NoFreeBlocks,
    NotFound,
    PdserveError,
    PeerLost,
    RequestError,
    StaleEpoch,
    TransferTimeout,
    error_classes,
)
from router_svc.request.output import OutputProgress
from router_svc.request.recovery import (
    MAX_DECODE_FAILURES,
    Failure,
    NextStep,
    after_decode_failure,
    after_prefill_failure,
    failure_of,
    is_refusal,
)

NOTHING, INCOMPLETE = OutputProgress.NOTHING, OutputProgress.INCOMPLETE
FIRST_TOKENS, BEYOND = OutputProgress.FIRST_TOKENS, OutputProgress.BEYOND
REQUEST, CAPACITY, TRANSFER, WORKER = Failure.REQUEST, Failure.CAPACITY, Failure.TRANSFER, Failure.WORKER
PREFILL = Failure.PREFILL
FAIL, RETRY, WAIT = NextStep.FAIL, NextStep.RETRY, NextStep.WAIT_FOR_CAPACITY
RENEW, LOCAL = NextStep.RENEW_TICKET, NextStep.PREFILL_LOCALLY
CARRY_ON, FAIL_ATTEMPT = NextStep.CARRY_ON, NextStep.FAIL_ATTEMPT


@pytest.mark.parametrize(
    ("error", "is_reported", "failure"),
    [
        (RequestError("odd"), True, REQUEST),
        (NotFound("no such model"), True, REQUEST),
        (NoFreeBlocks("full"), True, CAPACITY),
        (Draining("shutting down"), True, CAPACITY),
        (TransferTimeout("the lease ran out"), True, TRANSFER),
        (DigestMismatch("wrong bytes"), True, TRANSFER),
        (TransferTimeout("silent"), False, WORKER),
        (PeerLost("gone"), False, WORKER),
        (StaleEpoch("restarted"), True, WORKER),
        (PdserveError("a bug"), True, WORKER),
    ],
)
def test_failures_by_error(error: PdserveError, is_reported: bool, failure: Failure) -> None:
    assert failure_of(error, is_reported=is_reported) is failure


def test_every_error_is_some_failure() -> None:
    for cls, is_reported in itertools.product(error_classes().values(), (False, True)):
        assert failure_of(cls.__new__(cls), is_reported=is_reported) in Failure


def test_only_a_worker_that_is_not_at_fault_may_get_the_request_again() -> None:
    assert [failure for failure in Failure if not failure.excludes_worker] == [TRANSFER, PREFILL]


def test_neither_a_refusal_nor_a_lost_prefill_worker_counts_as_a_lost_decode_worker() -> None:
    cases = itertools.product(Failure, OutputProgress)
    assert {(failure, progress) for failure, progress in cases if not failure.is_loss(progress)} == {
        (CAPACITY, NOTHING),
        *((PREFILL, progress) for progress in OutputProgress),
    }


#: The step after a decode worker has failed, by failure and output, for:
#:   another decode worker and prefill workers, only another decode worker, only prefill workers, neither.
AFTER_DECODE: dict[tuple[Failure, OutputProgress], tuple[NextStep, NextStep, NextStep, NextStep]] = {
    (CAPACITY, NOTHING): (RETRY, RETRY, WAIT, WAIT),
    (CAPACITY, INCOMPLETE): (FAIL, FAIL, FAIL, FAIL),
    (CAPACITY, FIRST_TOKENS): (RETRY, FAIL, FAIL, FAIL),
    (CAPACITY, BEYOND): (FAIL, FAIL, FAIL, FAIL),
    (TRANSFER, NOTHING): (RETRY, RETRY, FAIL, FAIL),
    (TRANSFER, INCOMPLETE): (FAIL, FAIL, FAIL, FAIL),
    (TRANSFER, FIRST_TOKENS): (RETRY, FAIL, FAIL, FAIL),
    (TRANSFER, BEYOND): (FAIL, FAIL, FAIL, FAIL),
    (WORKER, NOTHING): (RETRY, RETRY, FAIL, FAIL),
    (WORKER, INCOMPLETE): (FAIL, FAIL, FAIL, FAIL),
    (WORKER, FIRST_TOKENS): (RETRY, FAIL, FAIL, FAIL),
    (WORKER, BEYOND): (FAIL, FAIL, FAIL, FAIL),
    (PREFILL, NOTHING): (RETRY, RETRY, FAIL, FAIL),
    (PREFILL, INCOMPLETE): (FAIL, FAIL, FAIL, FAIL),
    (PREFILL, FIRST_TOKENS): (RETRY, FAIL, FAIL, FAIL),
    (PREFILL, BEYOND): (FAIL, FAIL, FAIL, FAIL),
    (REQUEST, NOTHING): (FAIL, FAIL, FAIL, FAIL),
    (REQUEST, INCOMPLETE): (FAIL, FAIL, FAIL, FAIL),
    (REQUEST, FIRST_TOKENS): (FAIL, FAIL, FAIL, FAIL),
    (REQUEST, BEYOND): (FAIL, FAIL, FAIL, FAIL),
}
WORKERS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("failure", "progress"), [*itertools.product(Failure, OutputProgress)])
def test_after_a_decode_worker_has_failed(failure: Failure, progress: OutputProgress) -> None:
    steps = tuple(
        after_decode_failure(failure, progress, failures=1, has_other_decode=other, has_prefill=prefill)
        for other, prefill in WORKERS
    )
    assert steps == AFTER_DECODE[failure, progress]


@pytest.mark.parametrize(("failure", "progress"), [*itertools.product(Failure, OutputProgress)])
def test_after_too_many_failures_only_a_refusal_is_retried(failure: Failure, progress: OutputProgress) -> None:
    step = after_decode_failure(
        failure, progress, failures=MAX_DECODE_FAILURES + 1, has_other_decode=True, has_prefill=True
    )
    assert step is (RETRY if is_refusal(failure, progress) else FAIL)


def test_a_refusal_is_a_lack_of_capacity_before_any_token() -> None:
    refusals = [case for case in itertools.product(Failure, OutputProgress) if is_refusal(*case)]
    assert refusals == [(CAPACITY, NOTHING)]


#: The step after a prefill worker has failed, by output, once the decode worker has started.
AFTER_START = {NOTHING: FAIL_ATTEMPT, INCOMPLETE: FAIL_ATTEMPT, FIRST_TOKENS: CARRY_ON, BEYOND: CARRY_ON}


@pytest.mark.parametrize(
    ("failure", "progress", "has_other"), [*itertools.product(Failure, OutputProgress, (True, False))]
)
def test_after_a_prefill_worker_has_failed(failure: Failure, progress: OutputProgress, has_other: bool) -> None:
    before, after = (
        after_prefill_failure(failure, progress, decode_has_started=started, has_other_prefill=has_other)
        for started in (False, True)
    )
    assert before is (FAIL if failure is REQUEST else RENEW if has_other else LOCAL)
    assert after is (FAIL if failure is REQUEST else AFTER_START[progress])


@pytest.mark.parametrize(("failure", "progress"), [*itertools.product(Failure, OutputProgress)])
def test_a_prompt_that_must_not_reach_the_decode_tier_fails_without_another_prefill_worker(
    failure: Failure, progress: OutputProgress
) -> None:
    with_other, without = (
        after_prefill_failure(
            failure, progress, decode_has_started=False, has_other_prefill=has_other, may_prefill_on_decode=False
        )
        for has_other in (True, False)
    )
    assert (with_other, without) == (FAIL if failure is REQUEST else RENEW, FAIL)
