"""What happens in a handover and what to do about it: events and effects of its two state machines. Pure.

`index` numbers the messages of a transfer, as `TransferShape` does. An event of several messages is of a run: message
`index` and those behind it in its layer group.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import PdserveError, TransferError
from pdserve.base.ids import RequestId


# Events of the decode side.
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLanded:
    """Message `index` is in memory from which it still has to be copied to its blocks."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesReceived:
    """A run of messages is in its blocks; `digests` are those of the bytes that arrived, one for each message."""

    index: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLost:
    """The receive or the copy of message `index` failed; nothing will write to its blocks any more."""

    index: int
    error: TransferError


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitArrived:
    """A commit with a valid MAC. All fields are its identity: a repeated commit has the same."""

    request_id: RequestId
    attempt: int
    digests: tuple[bytes, ...]
    first_tokens: tuple[int, ...]
    numerics_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRenewed:
    """The router wants another ticket for the same blocks, for `attempt`: this transfer must end."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """The answer to `CancelReceives`: no buffer of the transfer can be written any more."""


# Events of both sides.
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKept:
    """The other side made progress that no message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The request no longer wants this transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Check the lease. The first one, right after the start, returns when to check again."""


# Events of the prefill side.
@dataclass(frozen=True, slots=True, kw_only=True)
class SendStarted:
    """A run of `count` messages is about to be handed to the transport."""

    index: int
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDone:
    """The transport no longer reads a run of `count` messages; `error` is why they did not get through."""

    index: int
    count: int = 1
    error: TransferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSent:
    """Every message was handed to the transport, and the first tokens are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnswered:
    """The decode worker answered; `error` when it refused the commit or could not be reached."""

    error: PdserveError | None = None


ReceiveEvent = (
    MessageLanded
    | MessagesReceived
    | MessageLost
    | CommitArrived
    | TicketRenewed
    | Quiet
    | LeaseKept
    | Aborted
    | TimePassed
)
SendEvent = SendStarted | SendDone | AllSent | CommitAnswered | LeaseKept | Aborted | TimePassed


# Effects of both sides.
@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLease:
    """Report `TimePassed` at `until`, in the time of the events. There is at most one such timer."""

    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Nothing reads or writes the blocks: they may be reused. Issued once, or never if `Verified` was.

    `error` is set when the machine ended by itself and the request has yet to learn why.
    """

    error: PdserveError | None = None


# Effects of the decode side.
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMessage:
    """Copy message `index` to its blocks, then report `MessagesReceived` or `MessageLost`."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReceives:
    """Withdraw every receive of the transfer, then report `Quiet`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Every byte is what was sent: the blocks belong to the request. Issued once, or never if `Released` was.

    `receive_s` is the time from the first to the last message.
    """

    first_tokens: tuple[int, ...]
    receive_s: float
    numerics_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit:
    """Answer all waiting commits: accepted, or refused with `error`."""

    error: PdserveError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetAt:
    """Answer repeated commits until `at`, in the time of the events, then forget the transfer."""

    at: float


# Effects of the prefill side.
@dataclass(frozen=True, slots=True, kw_only=True)
class StopSending:
    """No message can be sent any more, and a commit under way is given up. Issued once; `error` is the reason."""

    error: PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Sends are stuck: disconnect the peer, which ends them."""


ReceiveEffect = WatchLease | Released | StoreMessage | CancelReceives | Verified | AnswerCommit | ForgetAt
SendEffect = WatchLease | Released | StopSending | Disconnect
