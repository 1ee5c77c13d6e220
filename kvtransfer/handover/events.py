"""What happens to a handover and what is to be done about it: the events and effects of its two state machines.

`index` numbers messages, as `kvtransfer.handover.layer_groups` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import PdserveError, TransferError


# Events of the decode side.
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """Message `index` is in memory; `digest` is of what arrived."""

    index: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLost:
    """The receive of message `index` failed; nothing will write to its bytes any more."""

    index: int
    error: TransferError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitArrived:
    """A commit whose MAC is right. `attempt` is the sender's."""

    attempt: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKept:
    """The other side made progress that no message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The request no longer wants this transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Look at the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """After `CancelReceives`: no buffer of the transfer can be written any more."""


# Events of the prefill side; LeaseKept, Aborted and TimePassed are shared.
@dataclass(frozen=True, slots=True, kw_only=True)
class SendStarted:
    """Message `index` was handed to the transport."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDone:
    """The transport no longer reads message `index`; `error` says that it did not get through."""

    index: int
    error: TransferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSent:
    """Nothing follows; the first tokens are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnswered:
    """The decode worker's answer; `error` when it refused or could not be reached."""

    error: PdserveError | None = None


Event = (
    MessageReceived
    | MessageLost
    | CommitArrived
    | LeaseKept
    | Aborted
    | TimePassed
    | Quiet
    | SendStarted
    | SendDone
    | AllSent
    | CommitAnswered
)


# Effects.
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReceives:
    """Withdraw every receive of the transfer, then report `Quiet`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Every byte is what was sent: the blocks belong to the request, the transfer is over. Exactly once, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit:
    """Answer all waiting commits: accepted, or refused with `error`."""

    error: PdserveError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Nothing reads or writes the blocks: they may be reused. Exactly once, unless `Verified` came.

    `error`: why the machine ended by itself; None after an abort, and on the prefill side after a success.
    """

    error: PdserveError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Sends are stuck: give the peer up, which ends them."""


Effect = CancelReceives | Verified | AnswerCommit | Released | Disconnect
