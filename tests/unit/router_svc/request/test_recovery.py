"""The recovery policy as tables: every failure at every point of the output."""

from __future__ import annotations

import itertools

import pytest

from pdserve.base.errors import (
    DigestMismatch,
    Diverged,
    Draining,
    LayoutMismatch,
    NoFreeBlocks,
    NotFound,
    PdserveError,
    PeerLost,
    PeerRefused,
    RequestError,
    StaleEpoch,
    TransferError,
    TransferTimeout,
    error_classes,
)
from router_svc.request.recovery import (
    MAX_BROKEN,
    Failure,
    NextStep,
    after_decode_failure,
    after_prefill_failure,
    backoff_s,
    failure_of,
)

REQUEST, CAPACITY, TRANSFER, WORKER = Failure.REQUEST, Failure.CAPACITY, Failure.TRANSFER, Failure.WORKER
PREFILL, BROKEN, REFUSED = Failure.PREFILL, Failure.BROKEN, Failure.REFUSED
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
        (PeerRefused("no MAC"), True, REFUSED),
        (LayoutMismatch("other blocks"), True, BROKEN),
        (Diverged("other tokens"), True, BROKEN),
        (PdserveError("a bug"), True, BROKEN),
        (TransferError("it ended before every choice was complete"), False, BROKEN),
    ],
)
def test_failures_by_error(error: PdserveError, is_reported: bool, failure: Failure) -> None:
    assert failure_of(error, is_reported=is_reported, is_continuation=False) is failure
    if failure is not REQUEST:
        assert failure_of(error, is_reported=is_reported, is_continuation=True) is failure


def test_what_a_worker_refuses_to_go_on_with_is_not_the_clients_fault() -> None:
    """Another worker has accepted the request before."""
    error = RequestError("The context holds 100 tokens.")
    assert failure_of(error, is_reported=True, is_continuation=True) is BROKEN


def test_every_error_is_some_failure() -> None:
    for cls, is_reported in itertools.product(error_classes().values(), (False, True)):
        assert failure_of(cls.__new__(cls), is_reported=is_reported, is_continuation=False) in Failure


def test_only_a_worker_that_is_not_at_fault_may_get_the_request_again() -> None:
    assert [failure for failure in Failure if not failure.excludes_worker] == [TRANSFER, PREFILL]


def test_every_decode_worker_at_fault_is_the_last_choice_of_the_next_attempt() -> None:
    assert [failure for failure in Failure if not failure.avoids_worker] == [PREFILL]


#: The step after a decode worker has failed, when another one is ready; none is, but one is expected; none is expected.
AFTER_DECODE: dict[Failure, tuple[NextStep, NextStep, NextStep]] = {
    CAPACITY: (RETRY, WAIT, WAIT),
    TRANSFER: (RETRY, WAIT, FAIL),
    WORKER: (RETRY, WAIT, FAIL),
    PREFILL: (RETRY, WAIT, FAIL),
    BROKEN: (RETRY, WAIT, FAIL),
    REFUSED: (RETRY, WAIT, FAIL),
    REQUEST: (FAIL, FAIL, FAIL),
}
TIERS = [(True, True), (False, True), (False, False)]


@pytest.mark.parametrize("failure", Failure)
def test_after_a_decode_worker_has_failed(failure: Failure) -> None:
    steps = tuple(
        after_decode_failure(failure, broken=MAX_BROKEN, is_stranger=False, has_other_decode=other, is_patient=expected)
        for other, expected in TIERS
    )
    assert steps == AFTER_DECODE[failure]


@pytest.mark.parametrize("failure", Failure)
def test_what_another_worker_would_repeat_is_not_tried_again(failure: Failure) -> None:
    """A wrong request at once; one that two workers in a row break in, and one that all refuse as a stranger's, too.

    All else ends with the deadline alone.
    """
    steps = [
        after_decode_failure(failure, broken=MAX_BROKEN + 1, is_stranger=again, has_other_decode=True, is_patient=True)
        for again in (False, True)
    ]
    assert steps == [FAIL if failure in (REQUEST, BROKEN) else RETRY, FAIL]


def test_the_first_retry_comes_at_once_and_later_ones_ever_later() -> None:
    pauses = [backoff_s(failures, "request") for failures in range(12)]
    assert pauses[:2] == [0.0, 0.0]
    assert all(0.025 * 2**k <= pause <= 0.05 * 2**k for k, pause in enumerate(pauses[2:7]))
    assert all(1.0 <= pause <= 2.0 for pause in pauses[8:])


def test_pauses_differ_between_requests_and_not_between_runs() -> None:
    pauses = [backoff_s(5, f"request-{index}") for index in range(100)]
    assert len(set(pauses)) == 100
    assert pauses == [backoff_s(5, f"request-{index}") for index in range(100)]


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
def test_without_another_prefill_worker_a_prompt_that_must_not_reach_the_decode_tier_leaves_it(
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
    assert (with_other, without) == ((FAIL, FAIL) if failure is REQUEST else (RENEW, FAIL_ATTEMPT))
