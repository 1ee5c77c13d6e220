"""What the inbox of a decode session takes, and the bound on the commands that wait in it."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.handover.reservation import Received
from pdserve.base.errors import RequestError, StaleAttempt
from pdserve.base.ids import RequestId
from pdserve.engine.step import Grant, PrefillProgress, RequestStarted, RequestTokens
from pdserve.v1 import decode_pb2 as pb

#: Maximum size of the commands that wait to be handled; each counts for its bytes and the overhead. A router sends one
#: for each choice, and one with each report of progress from a prefill worker.
MAX_COMMAND_BYTES, COMMAND_OVERHEAD = 1 << 16, 128


@dataclass(frozen=True, slots=True)
class ChoicesEnded:
    """The engine has ended every choice."""


@dataclass(frozen=True, slots=True)
class Started:
    """The first step that computes something of the request has ended."""

    request: RequestStarted
    #: Start of that step on the event loop's clock, in seconds.
    started_at: float


#: Everything that a session's inbox takes, apart from failures.
SessionEvent = (
    Grant | Received | Started | PrefillProgress | RequestTokens | ChoicesEnded | pb.DecodeRequest | pb.DecodeResponse
)


def cost_of(command: pb.DecodeRequest) -> int:
    """What the command counts for while it waits."""
    return command.ByteSize() + COMMAND_OVERHEAD


def overtaken(request_id: RequestId, message: str, attempt: int, oldest: int) -> StaleAttempt:
    """The error for a command of an attempt that the router has given up since."""
    return StaleAttempt(
        f"A {message} of attempt {attempt} of request {request_id} came when only attempts from {oldest} on counted."
    )


def flooded(request_id: RequestId, waiting_bytes: int) -> RequestError:
    """The error of a router that sends commands faster than they are handled."""
    return RequestError(
        f"Request {request_id} has {waiting_bytes} bytes of commands waiting, limit {MAX_COMMAND_BYTES}. "
        "Send them more slowly."
    )
