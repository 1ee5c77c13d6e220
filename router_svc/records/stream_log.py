"""One stream that can be resumed, as the router that runs it reports it. `StreamLogs` writes it to Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pdserve.base.sampling import ChoiceTokens
from pdserve.base.tasks import in_turns
from pdserve.redis.store import Argument
from router_svc.records.resumable import (
    Charge,
    LoggedStep,
    Resumable,
    request_to_bytes,
    steps_from_bytes,
    steps_to_bytes,
)
from router_svc.records.stream_scripts import (
    APPEND,
    ARGUMENTS,
    FORGET,
    GONE,
    LEAVE,
    RENEW,
    REPLACED,
    START,
    TAKEN,
)
from router_svc.records.stream_seal import StreamSeal
from router_svc.routing.home import Home

#: Output beyond this size is not kept: the router that resumes the stream makes it again.
MAX_OUTPUT_BYTES = 4 << 20
#: Steps that wait to be written. More wait only during an outage of Redis.
_MAX_PENDING = 4096
#: Position of the request among the pieces, as far as the seal is concerned.
_REQUEST_INDEX = -1
_NONCE_BYTES = 8


class Ending(StrEnum):
    """How a router is done with a stream. Two are states in Redis."""

    #: Every choice is complete.
    COMPLETE = "complete"
    #: The client has left, the router ends, or capacity or a worker is missing: the stream can go on.
    LEFT = "left"
    #: Another error: nothing can go on.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """Where a stream is in Redis."""

    stream: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a router found of a stream that another one has started."""

    nonce: str
    fence: int
    is_complete: bool = False
    #: Pieces of the output, sealed; none of a stream that runs elsewhere.
    pieces: tuple[bytes, ...] = ()
    charge: Charge = field(default_factory=Charge)
    #: Lease of the limits of the client's key.
    lease: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvents:
    """What a log reports to its writer."""

    #: There is something to write.
    due: Callable[[StreamLog], None]
    #: Takes the stream from the router that runs it.
    take: Callable[[StreamLog], Awaitable[Found]]
    #: No more output is kept, for this reason.
    stopped: Callable[[str], None]


class StreamLog:
    """A stream in Redis. Owned by its request; never waits, except for its end."""

    def __init__(
        self,
        resumable: Resumable,
        key: StreamKey,
        seal: StreamSeal,
        events: LogEvents,
        found: Found | None = None,
    ) -> None:
        """`found`: another router has started the stream, and runs it until `take`."""
        self.resumable = resumable
        #: Whether another router has started the stream.
        self.is_resumed = found is not None
        #: Whether this router runs the stream, as far as it knows.
        self.is_ours = found is None
        found = found or Found(nonce=secrets.token_hex(_NONCE_BYTES), fence=1)
        #: What others have charged for this stream.
        self.charge = found.charge
        #: Lease of the limits that the request has reserved; empty: there are none.
        self.lease = found.lease
        #: Called once when another router has resumed the stream.
        self.on_taken: Callable[[], None] = lambda: None
        self.key = key
        self._seal = seal
        self._events = events
        self._found = found
        self._has_started = self.is_resumed
        self._next_piece = len(found.pieces)
        self._home = Home()
        #: Kind of the last write, whose answer is due.
        self._written = ""
        self._pending: list[LoggedStep] = []
        self._piece: bytes | None = None
        self._num_bytes = 0
        #: Whether output is kept.
        self._is_kept = True
        self._ending: Ending | None = None
        #: Whether there is nothing more to write.
        self.is_over = False
        #: Set when there is nothing more to wait for.
        self._ended = asyncio.Event()

    async def take(self) -> None:
        """This router runs a stream that it has found, from now on: the other one stops.

        Raises `StoreError`, or `NotFound` when there is none any more.
        """
        found = await self._events.take(self)
        self.is_ours = True
        self.charge = found.charge
        self._found, self._next_piece = found, len(found.pieces)

    async def steps(self) -> AsyncIterator[LoggedStep]:
        """The steps of other routers, which come before those of this one. Other callbacks run in between.

        Raises `Unreadable`.
        """
        for index, piece in enumerate(self._found.pieces):
            opened = self._seal.open(piece, self._found.nonce, index)
            async for step in in_turns(steps_from_bytes(opened)):
                self._home = Home(step.layout or self._home.layout, step.numerics_class or self._home.numerics_class)
                yield step
            await asyncio.sleep(0)
        if not self._found.is_complete:
            self._found = replace(self._found, pieces=())  # They are read once.

    @property
    def home(self) -> Home:
        """Where the last step that was read or added comes from."""
        return self._home

    @property
    def is_stored(self) -> bool:
        """Whether Redis has the request, as far as this router knows."""
        return self._has_started

    @property
    def nonce(self) -> str:
        """The random name of the stream, in hexadecimal."""
        return self._found.nonce

    def begin(self) -> None:
        """The request has been accepted here."""
        self._events.due(self)

    def append(self, prompt_index: int, choices: Sequence[ChoiceTokens], *, cached_tokens: int, home: Home) -> None:
        """New tokens of a prompt are about to be sent to the client, one in each of `choices`."""
        if not self._is_kept:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._stop("store")
            return
        before, self._home = self._home, home
        self._pending.append(
            LoggedStep(
                prompt_index=prompt_index,
                choices=tuple(choices),
                cached_tokens=cached_tokens,
                layout=None if home.layout == before.layout else home.layout,
                numerics_class=None if home.numerics_class == before.numerics_class else home.numerics_class,
            )
        )
        self._events.due(self)

    async def end(self, ending: Ending, charge: Charge) -> None:
        """This router is done with the stream, for which `charge` will have been charged, by it and others before it.

        Afterwards `is_ours` says whether this router may charge its part. Returns when Redis has answered.
        """
        if self._ending is not None or self.is_over or not self.is_ours:
            return
        self.charge = charge
        self._ending = ending
        self._events.due(self)
        await self._ended.wait()

    # -- for `StreamLogs`

    @property
    def is_urgent(self) -> bool:
        """Whether the next write should not wait for others."""
        return not self._has_started or self._ending is not None

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended."""
        return self._ending is not None

    def write(self) -> list[Argument]:
        """The arguments of the next write. The one after it follows the answer to this one."""
        if not self._has_started:
            sealed = self._seal.seal(request_to_bytes(self.resumable), self._found.nonce, _REQUEST_INDEX)
            return self._arguments(START, sealed, self.charge.to_text(), self.lease)
        if self._piece is None and self._pending:
            piece = steps_to_bytes(self._pending)
            self._pending.clear()
            self._num_bytes += len(piece)
            if self._num_bytes > MAX_OUTPUT_BYTES:
                self._stop("too_large")
            else:
                self._piece = self._seal.seal(piece, self._found.nonce, self._next_piece)
        if self._piece is not None:
            return self._arguments(APPEND, self._next_piece, self._piece)
        if self._ending is Ending.FAILED:
            return self._arguments(FORGET)
        if self._ending is not None:
            return self._arguments(LEAVE, self._state(), self.charge.to_text())
        return self._arguments(RENEW)

    def answered(self, reply: bytes) -> bool:
        """Takes the answer to the last write. Returns whether there is more to write at once."""
        if reply == TAKEN:
            self.is_ours = False
            self._over()
            self.on_taken()
        elif reply == REPLACED:
            self._stop("replaced")
            self._over()
        elif reply == GONE:
            self._lost()
        elif self._written == START:
            self._has_started = True
        elif self._written == APPEND:
            self._piece = None
            self._next_piece += 1
        elif self._written in (LEAVE, FORGET):
            self._over()
        return not self.is_over and (self._ending is not None or bool(self._pending))

    def give_up(self) -> None:
        """Redis does not answer: the request must not wait for it. What is left is written when it is back."""
        self._ended.set()

    def _state(self) -> Ending:
        """The state in Redis. It is `complete` only if all of the output was kept."""
        return self._ending if self._is_kept and self._ending is not None else Ending.LEFT

    def _lost(self) -> None:
        """Redis has lost the stream. The request is enough to make all of the output again."""
        self._stop("store")
        self._next_piece = 0
        self._has_started = False

    def _stop(self, reason: str) -> None:
        if self._is_kept:
            self._is_kept = False
            self._events.stopped(reason)
        self._pending.clear()
        self._piece = None

    def _over(self) -> None:
        self.is_over = True
        self._ended.set()

    def _arguments(self, kind: str, *others: Argument) -> list[Argument]:
        self._written = kind
        given: list[Argument] = [kind, self._found.nonce, self._found.fence, *others]
        return given + [""] * (ARGUMENTS - len(given))


def open_request(seal: StreamSeal, sealed: bytes, nonce: str) -> bytes:
    """The request that `StreamLog` has stored. Raises `StoreError`."""
    return seal.open(sealed, nonce, _REQUEST_INDEX)
