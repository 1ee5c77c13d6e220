"""What happens to a request after a worker has failed it. Pure policy, as a table; the saga executes the steps.

A decode worker failed       another one is ready     none is; it is patient          it is not
--------------------------   ----------------------   -----------------------------   ----------------------------
refused: no capacity         another                  wait                            wait
refused: it shuts down       another                  wait                            wait
lost, gone or stale          another                  wait                            fail
a transfer failed            another, or the same     wait                            fail
the prefill worker failed    the same, or another     wait                            fail
refused as a stranger's      another                  wait                            fail
  by all, for two seconds    fail                     fail                            fail
broken in the request        another, once            wait, once                      fail
the request is wrong         fail                     fail                            fail

A request is patient for `--worker-return-timeout-s` after the last answer of a worker, and while the tier is gone.

The number of tokens that the client has makes no difference: the next decode worker goes on behind them. Neither
does the number of workers that a request has lost: `losses` bounds it. From the second failure without a new token in
between, a retry comes after a pause.

A prefill worker failed      decode has not started                  decode has started
--------------------------   -------------------------------------   ---------------------------------------
any error                    renew the ticket for another, else      nothing, if the first tokens are known,
                             prefill on the decode worker; where     else the decode attempt has failed
                             it may not, the attempt has failed
the request is wrong         fail                                    fail

`quarantine` bounds how many workers may fail by themselves under a request, and to which tier recovery may take it.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from router_svc.request.failure import Failure
from router_svc.routing.home import Home
from router_svc.routing.incarnation import Incarnation

#: Workers that may break in a request without a new token in between. If another one does, the request fails.
MAX_BROKEN = 1
#: Prefill workers that may fail one request while they live, before the decode worker prefills.
MAX_PREFILL_FAILURES = 2
#: Pause before the second retry without a new token in between. It doubles with each further one, up to the limit.
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
#: Time in which a restarted worker, which refuses messages for its last incarnation, has published its new record.
_RECORD_S = 2.0
#: Time in which a lost worker that is started again is ready, as a rule.
_CLASS_RETURN_S = 3.0


class NextStep(Enum):
    """What the saga does next."""

    #: The client gets the error.
    FAIL = auto()
    #: A new attempt starts on another decode worker.
    RETRY = auto()
    #: The request waits until a decode worker has capacity, or is ready again.
    WAIT = auto()
    #: The decode worker issues a ticket for a new attempt, and another prefill worker gets the prompt.
    RENEW_TICKET = auto()
    #: The decode worker prefills.
    PREFILL_LOCALLY = auto()
    #: The attempt on the decode worker has failed, too.
    FAIL_ATTEMPT = auto()
    #: Nothing: the worker failed after its work was done.
    CARRY_ON = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a request waits for decode workers, in seconds."""

    #: For capacity, while all of them are full: `--reserve-timeout-s`.
    capacity_s: float
    #: For a lost worker to be back: `--worker-return-timeout-s`.
    return_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come: tokens that its client has, and times that a decode worker has answered a call."""

    tokens: int = 0
    answers: int = 0


class Recovery:
    """What the failures of decode workers so far mean for the next step of one request.

    `now` is any monotonic clock, in seconds. New tokens restart the counts of failures. Answers of workers, and workers
    that were not met before, renew the request's patience.
    """

    def __init__(self, patience: Patience, home: Home) -> None:
        self._patience = patience
        #: KV layout and numerics class of the last decode worker that has added tokens.
        self.home = home
        #: Workers that get no further attempt for now, and those that get one only where there is no other.
        self._failed: set[Incarnation] = set()
        self._avoided: set[Incarnation] = set()
        self._met: set[Incarnation] = set()
        #: When each worker first refused the request as a stranger's since the last token; whether all ready ones do.
        self._refused_at, self._is_stranger = dict[Incarnation, float](), False
        #: Since the last new token: failures of any kind, and workers that broke in the request.
        self._failures = self._broken = 0
        #: The last failure, and the progress until then.
        self._last: Failure | None = None
        self._progress = Progress()
        #: End of the time in which the request tries workers that cannot be reached, and waits for one that suits it.
        self._patient_until = 0.0
        #: End of the wait for workers that are full; and whether the request waits for these.
        self._capacity_until, self._is_for_capacity = 0.0, False
        #: End of the wait of an answer that has begun for a worker of its numerics class, even if another one is ready.
        self._same_class_until = 0.0

    def begin(self, now: float) -> None:
        """The request looks for its first decode worker, or anew, after all of them were gone for long."""
        self._patient_until = now + self._patience.return_s
        self._capacity_until = now + self._patience.capacity_s

    def failed(
        self,
        failure: Failure,
        worker: Incarnation,
        progress: Progress,
        now: float,
        *,
        ready: Collection[Incarnation] | None,
    ) -> None:
        """Takes note of a failure while the request ran on `worker`.

        `ready`: the decode workers that are ready; None: they are not known at present.
        """
        if failure.excludes_worker:
            self._failed.add(worker)
        if failure.avoids_worker:
            self._avoided.add(worker)
        if progress.tokens > self._progress.tokens:
            self._failures = self._broken = 0
            self._refused_at.clear()
            self._capacity_until = now + self._patience.capacity_s
        if progress.answers > self._progress.answers or worker not in self._met:
            # A worker that cannot be reached may seem to be back each time. Only its first failure renews the wait.
            self._met.add(worker)
            self._patient_until = now + self._patience.return_s
        self._last, self._progress = failure, progress
        self._is_for_capacity = failure is Failure.CAPACITY
        self._failures += 1
        if self._failures == 1:
            self._same_class_until = now + _CLASS_RETURN_S
        self._broken += failure is Failure.BROKEN
        if failure is Failure.REFUSED:
            waited_s = now - self._refused_at.setdefault(worker, now)
            all_refuse = ready is not None and {*ready} <= self._refused_at.keys()
            self._is_stranger = all_refuse and waited_s >= _RECORD_S

    def next_step(self, now: float, *, has_other: bool) -> NextStep:
        """The step after the last failure. `has_other`: a decode worker can take the request."""
        if self.is_final:
            return NextStep.FAIL
        if has_other:
            return NextStep.RETRY
        is_refused = self._last in (Failure.CAPACITY, Failure.DRAINING)
        return NextStep.WAIT if is_refused or self._is_patient(now) else NextStep.FAIL

    @property
    def is_final(self) -> bool:
        """Whether no other worker would do better: where two that live have broken, a third one would, too."""
        return self._last is Failure.REQUEST or self._broken > MAX_BROKEN or self._is_stranger

    def pause_s(self, key: str) -> float | None:
        """The pause before the next attempt; None if the last worker was full: the wait for capacity is the pause."""
        return None if self._is_for_capacity else backoff_s(self._failures, key)

    def _is_patient(self, now: float) -> bool:
        return now < self._patient_until

    # Which workers may be next.
    @property
    def exclusions(self) -> tuple[set[Incarnation], set[Incarnation]]:
        """Workers to leave out: at first also those that the request would rather avoid."""
        return self._failed | self._avoided, self._failed

    def forgive(self) -> None:
        """Something has changed: workers that have failed may get the request again."""
        self._failed.clear()

    def waits_for_class(self, now: float) -> bool:
        """Whether the request still waits for a worker of its answer's numerics class."""
        return now < min(self._same_class_until, self._patient_until)

    # Waiting for a worker.
    @property
    def capacity_until(self) -> float | None:
        """When the wait for workers that are full ends; None: the request waits for something else."""
        return self._capacity_until if self._is_for_capacity else None

    def gives_up(self, now: float) -> bool:
        """Whether the request has waited long enough for workers of a tier that is not gone."""
        return now >= self._capacity_until if self._is_for_capacity else not self._is_patient(now)

    def tier_is_gone(self) -> None:
        """No decode worker is ready: the request waits for one, not for capacity."""
        self._is_for_capacity = False


def backoff_s(failures: int, key: str) -> float:
    """The pause before a retry, after so many failures in a row without a new token.

    Equal keys have equal pauses. Different ones spread, so that the requests of a lost worker do not return together.
    """
    if failures < 2:
        return 0.0
    limit_s = min(_BACKOFF_S * 2.0 ** min(failures - 2, 16), _MAX_BACKOFF_S)
    return limit_s * random.Random(f"{key}/{failures}").uniform(0.5, 1.0)


def after_prefill_failure(
    failure: Failure,
    *,
    has_first_tokens: bool,
    decode_has_started: bool,
    has_other_prefill: bool,
    may_prefill_on_decode: bool = True,
) -> NextStep:
    """The step after a prefill worker has failed, on behalf of a decode worker that holds a reservation.

    Args:
        has_first_tokens: the first token of every choice is known.
        decode_has_started: the decode worker has all KV blocks and runs.
        has_other_prefill: another prefill worker can take the prompt.
        may_prefill_on_decode: the decode tier may compute the prompt.
    """
    if failure is Failure.REQUEST:
        return NextStep.FAIL
    if decode_has_started:
        return NextStep.CARRY_ON if has_first_tokens else NextStep.FAIL_ATTEMPT
    if has_other_prefill:
        return NextStep.RENEW_TICKET
    return NextStep.PREFILL_LOCALLY if may_prefill_on_decode else NextStep.FAIL_ATTEMPT
