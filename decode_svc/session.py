"""One request's life on a decode worker: commands of the router and events of the engine in, tickets and tokens out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.ticket import Ticket, ticket_to_proto
from pdserve.base.errors import InvalidTransition, PdserveError, RequestError, StaleAttempt, StaleError, reason_of
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger
from pdserve.base.streams import MessageStream, PeerLeft
from pdserve.base.tasks import service_group
from pdserve.base.wire import tokens_to_wire
from pdserve.engine.step import Grant, RequestStarted, RequestTokens
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inbox
from pdserve.worker.serve.worker import Worker

log = get_logger(__name__)

#: How long a router may leave a stream open that has nothing more to tell.
#: Longer than a router waits for a prefill worker, whose first token it may still miss when ours have all arrived.
_CLOSE_TIMEOUT_S = 30.0
#: Of a router's commands, what may wait to be obeyed; each counts for its bytes and the overhead. A router sends one
#: for each choice, and one with each sign of life from a prefill worker.
_MAX_COMMAND_BYTES, _COMMAND_OVERHEAD = 1 << 16, 128


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine has ended every choice."""


@dataclass(frozen=True, slots=True)
class Left:
    """The router has closed the stream."""


Event = Grant | RequestStarted | RequestTokens | Finished | Left | pb.DecodeRequest


class DecodeSession:
    """Reads its inbox until the request is over. Leaving `run`, however, frees everything the request holds here."""

    def __init__(
        self,
        worker: Worker,
        scheduler: DecodeScheduler,
        receiver: Receiver,
        inbox: Inbox[Event],
        stream: MessageStream[pb.DecodeRequest],
        *,
        lease_s: float,
    ) -> None:
        self._worker = worker
        self._lease_s = lease_s
        self._scheduler = scheduler
        self._receiver = receiver
        self._inbox = inbox
        self._stream = stream
        self._waiting_bytes = 0
        self._request_id = inbox.request_id
        self._attempt = inbox.attempt
        self._ticket: Ticket | None = None
        self._opened_at = _now()
        #: When nothing but the batch was left to wait for.
        self._runnable_at = self._opened_at
        #: Set when the transfer is verified; done when the sequences are queued to run.
        self.activated: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received = False

    async def run(self, job: DecodeJob) -> None:
        """Raises what ended the request, if not its last token; that may be `PeerLeft`."""
        async with service_group() as tasks:
            reading = tasks.start(self._read(), name=f"commands {self._request_id}")
            try:
                await self._worker.run(lambda: self._scheduler.reserve(job))
                while not await self._handle_next():
                    pass
            finally:
                await self._release()
            # The router closes the stream: a command that came after our end would reset the connection, and what the
            # router has not read yet would be lost with it.
            await asyncio.wait((reading,), timeout=_CLOSE_TIMEOUT_S)

    async def _read(self) -> None:
        while (command := await self._stream.read()) is not None:
            self._waiting_bytes += _cost(command)
            if self._waiting_bytes > _MAX_COMMAND_BYTES:
                self._inbox.put(Failed(error=_flooded(self._request_id, self._waiting_bytes)))
                return
            self._inbox.put(command)
        # Not raised here: that would cancel what frees blocks, should it be at it.
        self._inbox.put(Left())

    async def _handle_next(self) -> bool:
        """Handles one event; True after the last."""
        match await self._inbox.next():
            case Grant() as grant:
                await self._granted(grant)
            case RequestStarted() as started:
                await self._started(started)
            case RequestTokens() as new:
                # While the last message was written there may have been more steps: one message tells of them all.
                choices = [
                    *new.choices,
                    *(choice for later in self._inbox.more(RequestTokens) for choice in later.choices),
                ]
                tokens = pb.DecodeTokens(choices=map(tokens_to_wire, choices))
                await self._stream.write(pb.DecodeResponse(tokens=tokens))
            case pb.DecodeRequest() as command:
                self._waiting_bytes -= _cost(command)
                await self._obey(command)
            case Left():
                raise PeerLeft
            case Finished() | None:
                return True
        return False

    async def _granted(self, grant: Grant) -> None:
        reservation = Reservation(
            request_id=self._request_id,
            block_ids=grant.block_table[grant.num_cached_blocks :],
            first_block=grant.num_cached_blocks,
            lease_s=self._lease_s,
            on_received=self._on_received,
            on_expired=self._on_expired,
        )
        self._ticket = await self._receiver.grant(reservation, attempt=self._attempt)
        await self._hand_out(self._ticket)

    async def _hand_out(self, ticket: Ticket) -> None:
        granted = pb.TicketGranted(
            ticket=ticket_to_proto(ticket),
            cached_tokens=ticket.first_block * ticket.layout.block_size,
            reserve_s=_now() - self._opened_at,
        )
        await self._stream.write(pb.DecodeResponse(ticket=granted))

    async def _started(self, started: RequestStarted) -> None:
        message = pb.DecodeStarted(
            prefilled_locally=started.prefilled_locally,
            cached_tokens=started.num_cached,
            queue_s=_now() - self._runnable_at,
        )
        await self._stream.write(pb.DecodeResponse(started=message))

    async def _obey(self, command: pb.DecodeRequest) -> None:
        kind = command.WhichOneof("command")
        if kind == "keep_lease":
            if self._ticket is not None:
                self._receiver.keep_lease(self._ticket.transfer_id)
        elif kind == "stop_choice":
            choice = command.stop_choice.choice_index
            await self._worker.run(lambda: self._scheduler.stop_choice(self._request_id, choice))
        elif kind == "renew_ticket":
            await self._renew(command.renew_ticket.attempt)
        elif kind == "prefill_locally":
            await self._prefill_locally(command.prefill_locally)
        else:
            raise RequestError(f"The stream's first message is start; {kind or 'an empty message'} came later.")

    async def _renew(self, attempt: int) -> None:
        if self._ticket is None:
            raise InvalidTransition(f"Request {self._request_id} has no ticket to renew.")
        try:
            self._ticket = await self._receiver.renew(self._ticket.transfer_id, attempt=attempt)
        except StaleAttempt:
            raise
        except StaleError:
            # The commit or the end of the lease won the race, and the event that says so is on its way.
            return
        self._attempt = attempt
        await self._hand_out(self._ticket)

    async def _prefill_locally(self, command: pb.PrefillLocally) -> None:
        if self._ticket is not None:
            await self._receiver.abort(self._ticket.transfer_id)
        if self._received:
            return
        self._ticket = None
        self._attempt = command.attempt
        self._runnable_at = _now()
        forced = tuple(command.forced_first_tokens)
        await self._worker.run(lambda: self._scheduler.prefill_locally(self._request_id, forced))

    def _on_received(self, received: Received) -> None:
        """The blocks are verified: decoding starts with the next step, whether the prefill worker lives on or not."""
        self._received = True
        self._runnable_at = _now()
        posted = self._worker.post(lambda: self._scheduler.activate(self._request_id, received.first_tokens))
        activation = asyncio.wrap_future(posted)
        activation.add_done_callback(self._on_activated)

    def _on_expired(self, error: PdserveError) -> None:
        self._worker.metrics.ended(reason_of(error))
        self._inbox.put(Failed(error=error))

    def _on_activated(self, activation: asyncio.Future[None]) -> None:
        if activation.cancelled():
            return
        error = activation.exception()
        if isinstance(error, PdserveError):
            self._inbox.put(Failed(error=error))
        if self.activated.done():
            return
        if error is None:
            self.activated.set_result(None)
        else:
            self.activated.set_exception(error)

    async def _release(self) -> None:
        try:
            if self._ticket is not None:
                # Before the blocks are freed: until it is quiet, the transfer may still write to them.
                await self._receiver.abort(self._ticket.transfer_id)
        finally:
            self.activated.cancel()
            await self._worker.run(lambda: self._scheduler.abort(self._request_id))


def _cost(command: pb.DecodeRequest) -> int:
    return command.ByteSize() + _COMMAND_OVERHEAD


def _flooded(request_id: RequestId, waiting_bytes: int) -> RequestError:
    return RequestError(
        f"Request {request_id}: {waiting_bytes} bytes of commands wait to be obeyed, and {_MAX_COMMAND_BYTES} may."
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
