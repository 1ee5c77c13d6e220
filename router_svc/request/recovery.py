"""What happens to a request after a worker has failed it. Pure policy, as a table; the saga executes the steps.

A decode worker failed       another one is ready     none is; it is patient          it is not
--------------------------   ----------------------   -----------------------------   ----------------------------
refused: no capacity         another                  wait                            wait
lost, gone or stale          another                  wait                            fail
a transfer failed            another, or the same     wait                            fail
the prefill worker failed    the same, or another     wait                            fail
refused as a stranger's      another                  wait                            fail
  by all, for two seconds    fail                     fail                            fail
broken in the request        another, once            wait, once                      fail
the request is wrong         fail                     fail                            fail

Its patience lasts for `--worker-return-timeout-s` from the last answer of a worker on, and while the tier is gone.

How many tokens the client has makes no difference: the next decode worker goes on behind them. How many workers a
request has lost makes none either: its deadline ends it. From the second failure without a new token in between, a
retry comes after a pause.

A prefill worker failed      decode has not started                  decode has started
--------------------------   -------------------------------------   ---------------------------------------
any error                    renew the ticket for another, else      nothing, if the first tokens are known,
                             prefill on the decode worker; where     else the decode attempt has failed
                             it may not, the attempt has failed
the request is wrong         fail                                    fail

`quarantine` bounds how many workers a request may lose, and to which tier recovery may take it.
"""

from __future__ import annotations

import random
from enum import Enum, auto

from pdserve.base.errors import (
    CapacityError,
    Diverged,
    LayoutMismatch,
    PdserveError,
    PeerLost,
    PeerRefused,
    RequestError,
    StaleError,
    TransferError,
    TransferTimeout,
)

#: Workers that may break in a request, without a new token in between, before another one is taken to do the same.
MAX_BROKEN = 1
#: Prefill workers that may fail one request while they live, before the decode worker prefills.
MAX_PREFILL_FAILURES = 2
#: Pause before the second retry without a new token in between. It doubles with each further one, up to the limit.
_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0


class Failure(Enum):
    """Kinds of failures that the policy distinguishes."""

    #: The request itself is wrong: no worker will accept it.
    REQUEST = auto()
    #: The worker refused for lack of capacity.
    CAPACITY = auto()
    #: The worker reported a failed transfer (its lease ran out). It is healthy and may get the request again.
    TRANSFER = auto()
    #: The worker is lost, silent or stale.
    WORKER = auto()
    #: The worker takes the message for a stranger's. It may have restarted since, as another incarnation.
    REFUSED = auto()
    #: The worker lives, and something is wrong with what it made of the request. Others may well do the same.
    BROKEN = auto()
    #: A prefill worker failed, and with it the attempt of the decode worker that waited for it.
    PREFILL = auto()

    @property
    def avoids_worker(self) -> bool:
        """Whether the request prefers any other worker."""
        return self is not Failure.PREFILL

    @property
    def excludes_worker(self) -> bool:
        """Whether the worker gets no further attempt of this request until something has changed."""
        return self not in (Failure.TRANSFER, Failure.PREFILL)


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


def failure_of(error: PdserveError, *, is_reported: bool, is_continuation: bool) -> Failure:
    """The kind of a failure.

    Args:
        is_reported: the worker itself has answered with this error.
        is_continuation: another worker has accepted the request before, and has computed tokens of it.
    """
    if isinstance(error, RequestError):
        return Failure.BROKEN if is_continuation else Failure.REQUEST
    if isinstance(error, CapacityError):
        return Failure.CAPACITY
    if isinstance(error, PeerRefused):
        return Failure.REFUSED
    if isinstance(error, (LayoutMismatch, Diverged)):
        return Failure.BROKEN
    if isinstance(error, TransferError) and is_reported:
        return Failure.TRANSFER
    return Failure.WORKER if isinstance(error, (PeerLost, TransferTimeout, StaleError)) else Failure.BROKEN


def after_decode_failure(
    failure: Failure, *, broken: int, is_stranger: bool, has_other_decode: bool, is_patient: bool
) -> NextStep:
    """The step after a decode worker has failed.

    Args:
        broken: decode workers that broke in this request since its last token, this one included.
        is_stranger: all workers refuse the request as a stranger's.
        has_other_decode: another decode worker can take the request.
        is_patient: the request waits for a decode worker.
    """
    if failure is Failure.REQUEST or (failure is Failure.BROKEN and broken > MAX_BROKEN) or is_stranger:
        return NextStep.FAIL
    if has_other_decode:
        return NextStep.RETRY
    return NextStep.WAIT if failure is Failure.CAPACITY or is_patient else NextStep.FAIL


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
