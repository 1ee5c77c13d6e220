"""What the inbox of a decode session takes, and the bound on the commands that wait in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvtransfer.handover.reservation import Received
from pdserve.base.errors import StaleAttempt
from pdserve.base.ids import RequestId
from pdserve.engine.step import Grant, PrefillProgress, RequestStarted, RequestTokens
from pdserve.v1 import decode_pb2 as pb

#: While the commands that wait to be handled exceed this size, no more are read. Each counts with its bytes and the
#: overhead. A router sends one command per choice, and one with each report of progress from a prefill worker.
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


class WaitingCommands:
    """The size of the commands that wait to be handled. Belongs to the event loop."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._is_closed = False
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, command: pb.DecodeRequest) -> None:
        """A command has come, and waits."""
        self._num_bytes += _cost_of(command)
        if self._num_bytes > MAX_COMMAND_BYTES and not self._is_closed:
            self._has_room.clear()

    def remove(self, command: pb.DecodeRequest) -> None:
        """A command has been handled."""
        self._num_bytes -= _cost_of(command)
        if self._num_bytes <= MAX_COMMAND_BYTES:
            self._has_room.set()

    def close(self) -> None:
        """From now on, all commands are read, and none waits."""
        self._is_closed = True
        self._has_room.set()

    async def wait_for_room(self) -> None:
        """Returns when another command may be read."""
        await self._has_room.wait()


def _cost_of(command: pb.DecodeRequest) -> int:
    return command.ByteSize() + COMMAND_OVERHEAD


def overtaken(request_id: RequestId, message: str, attempt: int, oldest: int) -> StaleAttempt:
    """The error for a command of an attempt that the router has given up since."""
    return StaleAttempt(
        f"A {message} of attempt {attempt} of request {request_id} came when only attempts from {oldest} on counted."
    )
