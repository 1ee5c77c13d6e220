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
from pdserve.base.ids import Epoch, WorkerId
from router_svc.request.failure import Failure, failure_of
from router_svc.request.recovery import (
    NextStep,
    Patience,
    Progress,
    Recovery,
    after_prefill_failure,
    backoff_s,
)
from router_svc.routing.home import Home
from router_svc.routing.incarnation import Incarnation

REQUEST, CAPACITY, TRANSFER, WORKER = Failure.REQUEST, Failure.CAPACITY, Failure.TRANSFER, Failure.WORKER
PREFILL, BROKEN, REFUSED, DRAINING = Failure.PREFILL, Failure.BROKEN, Failure.REFUSED, Failure.DRAINING
FAIL, RETRY, WAIT = NextStep.FAIL, NextStep.RETRY, NextStep.WAIT
RENEW, LOCAL = NextStep.RENEW_TICKET, NextStep.PREFILL_LOCALLY
CARRY_ON, FAIL_ATTEMPT = NextStep.CARRY_ON, NextStep.FAIL_ATTEMPT


@pytest.mark.parametrize(
    ("error", "is_reported", "failure"),
    [
        (RequestError("odd"), True, REQUEST),
        (NotFound("no such model"), True, REQUEST),
        (NoFreeBlocks("full"), True, CAPACITY),
        (Draining("shutting down"), True, DRAINING),
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


A, B = (WorkerId("a"), Epoch(1)), (WorkerId("b"), Epoch(1))
#: Seconds that the request waits for capacity, and for a worker to be back.
CAPACITY_S, RETURN_S = 20.0, 60.0


class Failures:
    """A request on workers `a` and `b`, whose failures come at given times after it."""

    def __init__(self) -> None:
        self.recovery = Recovery(Patience(capacity_s=CAPACITY_S, return_s=RETURN_S), Home())
        self.recovery.begin(0.0)
        self.progress = Progress()

    def add(self, failure: Failure, worker: Incarnation = A, *, at: float = 0.0, tokens: int = 0) -> None:
        """A failure. `tokens`: new ones before it, which come with an answer."""
        self.progress = Progress(self.progress.tokens + tokens, self.progress.answers + bool(tokens))
        self.recovery.failed(failure, worker, self.progress, at, ready=(A, B))

    def steps(self, at: float = 0.0) -> tuple[NextStep, NextStep]:
        """The step where another worker can take the request, and where none can."""
        return self.recovery.next_step(at, has_other=True), self.recovery.next_step(at, has_other=False)


#: The step after a decode worker has failed, when another one is ready; none is, and the request is patient; it is not.
AFTER_DECODE: dict[Failure, tuple[NextStep, NextStep, NextStep]] = {
    CAPACITY: (RETRY, WAIT, WAIT),
    DRAINING: (RETRY, WAIT, WAIT),
    TRANSFER: (RETRY, WAIT, FAIL),
    WORKER: (RETRY, WAIT, FAIL),
    PREFILL: (RETRY, WAIT, FAIL),
    BROKEN: (RETRY, WAIT, FAIL),
    REFUSED: (RETRY, WAIT, FAIL),
    REQUEST: (FAIL, FAIL, FAIL),
}


@pytest.mark.parametrize("failure", Failure)
def test_after_a_decode_worker_has_failed(failure: Failure) -> None:
    failures = Failures()
    failures.add(failure)
    assert (*failures.steps(), failures.steps(RETURN_S)[1]) == AFTER_DECODE[failure]


@pytest.mark.parametrize("failure", Failure)
def test_what_another_worker_would_repeat_is_not_tried_again(failure: Failure) -> None:
    """A wrong request at once; one that two workers in a row break in, too. All else ends with the deadline alone."""
    failures = Failures()
    for worker in (A, B, A, B):
        failures.add(failure, worker)
    assert failures.steps()[0] is (FAIL if failure in (REQUEST, BROKEN) else RETRY)
    assert failures.recovery.is_final == (failure in (REQUEST, BROKEN))


def test_what_all_workers_refuse_as_a_strangers_is_final_when_they_had_time_to_return() -> None:
    failures = Failures()
    failures.add(REFUSED, A, at=0.0)
    failures.add(REFUSED, A, at=5.0)
    assert not failures.recovery.is_final  # The other one was not asked.
    failures.add(REFUSED, B, at=5.0)
    assert not failures.recovery.is_final
    failures.add(REFUSED, B, at=7.0)
    assert failures.recovery.is_final
    assert failures.steps(7.0) == (FAIL, FAIL)


def test_while_the_workers_are_not_known_no_refusal_is_final() -> None:
    failures = Failures()
    for at in (0.0, 9.0):
        failures.recovery.failed(REFUSED, A, Progress(), at, ready=None)
    assert not failures.recovery.is_final


def test_new_tokens_begin_a_new_count() -> None:
    failures = Failures()
    for worker in (A, B, A, B):
        failures.add(BROKEN, worker, tokens=1)
        assert not failures.recovery.is_final
        assert failures.recovery.pause_s("request") == 0.0
    failures.add(BROKEN)
    assert failures.recovery.is_final


def test_pauses_grow_while_no_token_comes_and_there_are_none_while_workers_are_full() -> None:
    failures = Failures()
    pauses = list[float]()
    for _ in range(4):
        failures.add(WORKER)
        pause = failures.recovery.pause_s("request")
        assert pause is not None
        pauses.append(pause)
    assert pauses[0] == 0.0
    assert sorted(pauses) == pauses
    failures.add(CAPACITY)
    assert failures.recovery.pause_s("request") is None
    failures.add(DRAINING)
    assert failures.recovery.pause_s("request") is not None


def test_a_request_waits_as_long_for_capacity_as_it_may_and_for_all_else_until_it_is_impatient() -> None:
    failures = Failures()
    failures.add(CAPACITY)
    assert failures.recovery.capacity_until == CAPACITY_S
    assert [failures.recovery.gives_up(at) for at in (CAPACITY_S - 1, CAPACITY_S)] == [False, True]
    failures.recovery.tier_is_gone()
    assert failures.recovery.capacity_until is None
    assert [failures.recovery.gives_up(at) for at in (CAPACITY_S, RETURN_S - 1, RETURN_S)] == [False, False, True]


def test_patience_lasts_from_the_last_answer_or_the_first_failure_of_a_worker_on() -> None:
    failures = Failures()
    failures.add(WORKER, A, at=10.0)
    assert not failures.recovery.gives_up(10.0 + RETURN_S - 1)
    failures.add(WORKER, A, at=30.0)  # It may seem to be back each time.
    assert failures.recovery.gives_up(10.0 + RETURN_S)
    failures.add(WORKER, B, at=30.0)
    assert not failures.recovery.gives_up(30.0 + RETURN_S - 1)
    failures.add(WORKER, A, at=50.0, tokens=1)
    assert not failures.recovery.gives_up(50.0 + RETURN_S - 1)


def test_workers_at_fault_come_last_or_not_at_all_until_something_changes() -> None:
    failures = Failures()
    failures.add(TRANSFER, A)
    failures.add(WORKER, B)
    assert failures.recovery.exclusions == ({A, B}, {B})
    failures.recovery.forgive()
    assert failures.recovery.exclusions == ({A, B}, set())


def test_an_answer_waits_a_while_for_a_worker_of_its_class_each_time_that_one_is_lost() -> None:
    failures = Failures()
    failures.add(WORKER, A, at=10.0, tokens=1)
    assert failures.recovery.waits_for_class(12.9)
    assert not failures.recovery.waits_for_class(13.0)
    failures.add(WORKER, B, at=20.0)  # No new token since.
    assert not failures.recovery.waits_for_class(20.1)
    failures.add(WORKER, A, at=30.0, tokens=1)
    assert failures.recovery.waits_for_class(32.9)


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
