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
from router_svc.request.recovery import (
    MAX_DECODE_FAILURES,
    Failure,
    NextStep,
    after_decode_failure,
    after_prefill_failure,
    failure_of,
)

REQUEST, CAPACITY, TRANSFER, WORKER = Failure.REQUEST, Failure.CAPACITY, Failure.TRANSFER, Failure.WORKER
PREFILL = Failure.PREFILL
FAIL, RETRY, WAIT = NextStep.FAIL, NextStep.RETRY, NextStep.WAIT
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
    assert [failure for failure in Failure if not failure.is_loss] == [CAPACITY, PREFILL]


#: The step after a decode worker has failed, when another one is ready; none is, but one is expected; none is expected.
AFTER_DECODE: dict[Failure, tuple[NextStep, NextStep, NextStep]] = {
    CAPACITY: (RETRY, WAIT, WAIT),
    TRANSFER: (RETRY, WAIT, FAIL),
    WORKER: (RETRY, WAIT, FAIL),
    PREFILL: (RETRY, WAIT, FAIL),
    REQUEST: (FAIL, FAIL, FAIL),
}
TIERS = [(True, True), (False, True), (False, False)]


@pytest.mark.parametrize("failure", Failure)
def test_after_a_decode_worker_has_failed(failure: Failure) -> None:
    steps = tuple(
        after_decode_failure(failure, failures=MAX_DECODE_FAILURES, has_other_decode=other, is_expected=expected)
        for other, expected in TIERS
    )
    assert steps == AFTER_DECODE[failure]


@pytest.mark.parametrize("failure", Failure)
def test_after_too_many_failures_only_a_refusal_is_retried(failure: Failure) -> None:
    step = after_decode_failure(failure, failures=MAX_DECODE_FAILURES + 1, has_other_decode=True, is_expected=True)
    assert step is (RETRY if failure is CAPACITY else FAIL)


@pytest.mark.parametrize(
    ("failure", "has_first", "has_other"), [*itertools.product(Failure, (True, False), (True, False))]
)
def test_after_a_prefill_worker_has_failed(failure: Failure, has_first: bool, has_other: bool) -> None:
    before, after = (
        after_prefill_failure(
            failure, has_first_tokens=has_first, decode_has_started=started, has_other_prefill=has_other
        )
        for started in (False, True)
    )
    assert before is (FAIL if failure is REQUEST else RENEW if has_other else LOCAL)
    assert after is (FAIL if failure is REQUEST else CARRY_ON if has_first else FAIL_ATTEMPT)


@pytest.mark.parametrize(("failure", "has_first"), [*itertools.product(Failure, (True, False))])
def test_a_prompt_that_must_not_reach_the_decode_tier_fails_without_another_prefill_worker(
    failure: Failure, has_first: bool
) -> None:
    with_other, without = (
        after_prefill_failure(
            failure,
            has_first_tokens=has_first,
            decode_has_started=False,
            has_other_prefill=has_other,
            may_prefill_on_decode=False,
        )
        for has_other in (True, False)
    )
    assert (with_other, without) == (FAIL if failure is REQUEST else RENEW, FAIL)
