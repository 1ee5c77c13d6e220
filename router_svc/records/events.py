"""What happens to a prompt's request, one class for each kind of event. When it happened is noted in the `EventLog`.

A new kind of event is a class here, appended to the `Journal` where it happens. `transitions` has what it does to the
request's state. The module of its subject has what the decision record says of it: `milestones`, `timeline`,
`decisions`, `prefill`, `migration` or `pauses`. `Journal` has its metric and its log line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from pdserve.base.errors import Cancelled, Displaced, EndedEarly, Overloaded, PdserveError, reason_of
from pdserve.base.ids import Epoch, WorkerId
from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import decode_pb2, prefill_pb2
from router_svc.records.request_state import RequestState
from router_svc.routing.local_prefill import PrefillPlan
from router_svc.routing.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the request."""

    #: Events of this kind that are kept: half of them are the first ones, half the last ones.
    max_kept: ClassVar[int] = 64


# -- admission and workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(Event):
    """The request left the admission queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChosen(Event):
    """A worker is about to be called: the decision for it, with its reason."""

    worker: WorkerId
    epoch: Epoch
    tier: str
    why: str
    #: Where the prompt should be prefilled, decided with the choice of a decode worker.
    plan: PrefillPlan | None = None
    #: Whether a prefill worker scores the prompt, before anything else.
    scores: bool = False

    @classmethod
    def of(
        cls,
        placement: Placement,
        *,
        plan: PrefillPlan | None = None,
        scores: bool = False,
        move: MoveStarted | None = None,
        remark: str = "",
    ) -> WorkerChosen:
        """The choice of a placement; with `move`, as its target. `remark`: what else has had a part in it."""
        reasons = ("" if move is None else move.why, placement.why, "" if plan is None else plan.why, remark)
        worker = placement.worker
        return cls(
            worker=worker.worker_id,
            epoch=worker.epoch,
            tier=worker.tier,
            why="; ".join(filter(None, reasons)),
            plan=plan,
            scores=scores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """A worker has failed, and the next attempt starts."""

    reason: str
    worker: WorkerId
    error: str

    @classmethod
    def of(cls, error: PdserveError, worker: WorkerRecord) -> Retried:
        """The retry behind this error."""
        return cls(reason=reason_of(error), worker=worker.worker_id, error=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefillOrdered(Event):
    """The decode worker is to compute the prompt itself, in an attempt of its own. `FellBack` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBack(Event):
    """A decode worker prefills although a prefill worker should have."""

    reason: str
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsChanged(Event):
    """The next attempt goes on with the tokens of another numerics class, for no worker of it is left."""

    before: str
    after: str
    worker: WorkerId

    @property
    def remark(self) -> str:
        """Its part in the choice of the worker."""
        return f"numerics change from {self.before} to {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker was lost under the request."""

    worker: WorkerId
    #: What follows for the choice of workers; empty: nothing.
    remark: str


# -- moves to another decode worker


class MigrationOutcome(StrEnum):
    """How a move has ended. The values are labels of a metric."""

    #: The other worker has taken over.
    MOVED = "moved"
    #: The other worker has taken over because the one that the request was to leave was lost.
    SOURCE_LOST = "source_lost"
    #: The request has stayed.
    FAILED = "failed"
    #: The request has ended before.
    ENDED = "ended"

    @property
    def has_moved(self) -> bool:
        """Whether the request is on the other worker."""
        return self in (MigrationOutcome.MOVED, MigrationOutcome.SOURCE_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStarted(Event):
    """The request is to go on at `target`, and leave `source`."""

    #: The number of the move in the record, from 1.
    number: int
    #: Why the source asked to be left: drain, full or rebalance.
    reason: str
    source: WorkerId
    target: WorkerId
    #: Whether full blocks are copied; else they are computed again.
    is_copied: bool

    @property
    def why(self) -> str:
        """The reason of the target's choice."""
        how = "blocks are copied" if self.is_copied else "computed again"
        return f"moves from {self.source} ({self.reason}), {how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TookOver(Event):
    """The target of the latest move is about to go on alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnded(Event):
    """The latest move has ended."""

    number: int
    outcome: MigrationOutcome
    sent_blocks: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePaused(Event):
    """The worker that has taken over has sent its first tokens, so long after the last tokens before."""

    number: int
    seconds: float


# -- what workers report


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReserved(Event):
    """The decode worker has reserved blocks, and granted a ticket."""

    worker: WorkerId
    reserve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStarted(Event):
    """The sequences run on the decode worker."""

    worker: WorkerId
    queue_s: float
    is_prefilled_locally: bool
    cached_tokens: int
    #: For how long it has computed the prompt, where it is prefilled locally.
    computing_s: float

    @classmethod
    def of(cls, started: decode_pb2.DecodeStarted, worker: WorkerRecord) -> DecodeStarted:
        """As the worker has reported it."""
        return cls(
            worker=worker.worker_id,
            queue_s=started.queue_s,
            is_prefilled_locally=started.prefilled_locally,
            cached_tokens=started.cached_tokens,
            computing_s=started.computing_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDecoded(Event):
    """A decode worker has sent tokens, for the first time in its attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgressed(Event):
    """The prefill worker computes the prompt."""

    max_kept: ClassVar[int] = 256
    computing_s: float
    cached_tokens: int
    computed_tokens: int

    @classmethod
    def of(cls, progress: prefill_pb2.PrefillProgress) -> PrefillProgressed:
        """As the worker has reported it."""
        return cls(
            computing_s=progress.computing_s,
            cached_tokens=progress.cached_tokens,
            computed_tokens=progress.computed_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled(Event):
    """The prefill worker has sampled the first tokens."""

    cached_tokens: int
    #: Whether these tokens end every choice.
    is_complete: bool

    @classmethod
    def of(cls, first: prefill_pb2.PrefillFirstToken) -> Prefilled:
        """As the worker has reported it."""
        return cls(cached_tokens=first.cached_tokens, is_complete=all(choice.finish_reason for choice in first.choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillScored(Event):
    """The prompt has its log-probabilities or its embedding."""

    #: Whether workers get the prompt again, for an output.
    has_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """The prefill worker has handed over the prompt."""

    #: Its measurements, named as in the decision record.
    reported: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, done: prefill_pb2.PrefillDone) -> Committed:
        """As the worker has reported it."""
        return cls(
            reported={
                "prefill_queue_s": done.queue_s,
                "prefill_compute_s": done.compute_s,
                "transfer_s": done.transfer_s,
                "commit_s": done.commit_s,
                "exposed_s": done.exposed_s,
                "sent_bytes": done.sent_bytes,
                "sent_blocks": done.sent_blocks,
                "chunks": done.chunks,
            }
        )


# -- output


class StallReason(StrEnum):
    """Why output has stalled. The values are labels of a metric."""

    #: A worker was lost, or has failed the request.
    RECOVERY = "recovery"
    #: The request was moving to another decode worker.
    MOVE = "move"
    #: Neither: a busy or stopped worker, preemption, or a client that reads slowly.
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(Event):
    """The first new tokens are about to be sent to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWrite(Event):
    """The first token of the response was written to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WentOn(Event):
    """The output goes on after a pause, which was behind an error or long."""

    #: Start of the pause, in seconds since the request was accepted, and its length.
    since: float
    seconds: float
    #: Tokens of all choices before it.
    completion_tokens: int
    #: The error behind which the output goes on; empty without one.
    error: str
    #: None: the pause was short.
    stall: StallReason | None


# -- the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    """The request has ended."""

    state: RequestState
    #: The finish reasons, or the error's class.
    outcome: str
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None
    #: What has ended it before it was complete; None: nothing has.
    early: str | None = None
    #: Reason of a rejection after it had been queued; None: it was not rejected.
    rejection: str | None = None

    @classmethod
    def finished(cls, finish_reasons: list[str]) -> Ended:
        """Every choice is complete."""
        return cls(state=RequestState.FINISHED, outcome=",".join(finish_reasons), finish_reasons=tuple(finish_reasons))

    @classmethod
    def failed(cls, error: PdserveError, *, early: str | None = None) -> Ended:
        """The client gets `error`."""
        rejection = "displaced" if isinstance(error, Displaced) else "queue_timeout"
        return cls(
            state=RequestState.FAILED,
            outcome=type(error).__name__,
            error=str(error),
            early=early,
            rejection=rejection if isinstance(error, Overloaded) else None,
        )

    @classmethod
    def ended_early(cls, cause: EndedEarly | None) -> Ended:
        """The work was ended by `cause`; None: the client has left."""
        early = "disconnected" if cause is None else reason_of(cause)
        if cause is not None and not isinstance(cause, Cancelled):
            return cls.failed(cause, early=early)
        error = None if cause is None else str(cause)
        return cls(state=RequestState.CANCELLED, outcome="cancelled", error=error, early=early)
