"""One request's life on a decode worker: commands of the router and events of the engine in, tickets and tokens out."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace

from decode_svc.migration.catch_up import CatchUpQueue
from decode_svc.peer_transfers import PeerTransfers
from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.session_events import (
    ChoicesEnded,
    SessionEvent,
    Started,
    WaitingCommands,
    overtaken,
)
from decode_svc.session_life import Queued, Receiving, Runnable
from decode_svc.spans import DecodeTrace
from decode_svc.token_messages import token_messages
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.sealed_ticket import sealed_ticket
from kvtransfer.handover.ticket import Commit, Ticket
from pdserve.base.block_hash import HASH_KEY_BYTES
from pdserve.base.errors import InvalidTransition, PdserveError, RequestError, StaleError
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.engine.step import Grant, PrefillProgress, RequestTokens
from pdserve.net.streams import MessageStream, PeerLeft
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Failed, Inbox
from pdserve.worker.serve.worker import Worker

#: Time a router has for closing the stream after the last token. It is longer than a router waits for a client that
#: does not read, or for a prefill worker's first token, which may come after all tokens of this worker.
_CLOSE_TIMEOUT_S = 90.0


class DecodeSession:
    """Handles its inbox until the request is over. However `run` ends, all that the request holds here is freed."""

    def __init__(
        self,
        worker: Worker,
        scheduler: DecodeScheduler,
        transfers: PeerTransfers,
        inbox: Inbox[SessionEvent],
        stream: MessageStream[pb.DecodeRequest],
        *,
        lease_s: float,
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._transfers = transfers
        self._receiver = transfers.receiver
        self._inbox = inbox
        self._stream = stream
        self._lease_s = lease_s
        self._tasks: ServiceGroup | None = None
        self._request_id = inbox.request_id
        #: Attempt of the last ticket; before the first ticket, attempt of the start.
        self._attempt = inbox.attempt
        self._backlog = WaitingCommands()
        self._catching_up = CatchUpQueue(worker, scheduler.migrating, inbox.request_id, self._backlog)
        self._num_cached_blocks = 0
        #: Times of the request's events, for its spans.
        self.trace = DecodeTrace(opened_at=_now())
        self._has_ended = False
        self._life: Queued | Receiving | Runnable = Queued(self.trace.opened_at)
        #: Set when received KV was activated, and when that will not happen any more.
        self._activation_decided = asyncio.Event()
        #: Why received KV is not active; None once it is.
        self._not_active: PdserveError | None = StaleError(
            f"Request {inbox.request_id} ended before its received KV was activated."
        )

    async def run(self, job: DecodeJob) -> None:
        """Raises the error that ended the request before its last token, possibly `PeerLeft`."""
        self._life = Queued(self.trace.opened_at, senders_ask=job.senders_ask)
        async with service_group() as tasks:
            self._tasks = tasks
            reading = tasks.start(self._read(), name=f"commands {self._request_id}")
            try:
                await self._worker.run(lambda: self._scheduler.reserve(job))
                while not await self._handle_next():
                    pass
            finally:
                await self._release()
            self._has_ended = True
            self._backlog.close()
            await self._stream.write(pb.DecodeResponse(ended=pb.DecodeEnded()))
            # Commands are read until the router closes the stream. A command that nobody has read would reset the
            # connection when it is closed here, and what the router has not read yet would be lost with it.
            # A newer attempt ends this wait: nothing that it needs is held here any more.
            with suppress(PdserveError, PeerLeft):
                await self._inbox.unless_failed(asyncio.wait((reading,), timeout=_CLOSE_TIMEOUT_S))

    async def commit(self, commit: Commit) -> Received:
        """Waits until the transfer is verified and its sequences are queued to run.

        Raises what `Receiver.commit` does, the error with which activation failed, or `StaleError` when the request
        ended before its activation.
        """
        received = await self._receiver.commit(commit)
        await self._activation_decided.wait()
        if self._not_active is not None:
            raise self._not_active
        return received

    async def _read(self) -> None:
        while (command := await self._stream.read()) is not None:
            if self._has_ended:
                continue
            self._backlog.add(command)
            self._inbox.put(command)
            # A router that sends faster than commands are handled has to wait.
            await self._backlog.wait_for_room()
        # The error is not raised here: it would cancel a release of blocks that is in progress.
        self._inbox.put(Failed(error=PeerLeft()))

    async def _handle_next(self) -> bool:
        """Handles one event; True after the last."""
        match await self._inbox.next():
            case Grant() as grant:
                await self._on_grant(grant)
            case Received() as received:
                await self._activate(received)
            case Started() as started:
                self.trace.started_at = started.started_at
                await self._report_started(started)
            case PrefillProgress(num_computed=num_tokens):
                progress = pb.DecodeProgress(computed_tokens=num_tokens)
                await self._stream.write(pb.DecodeResponse(progress=progress))
            case RequestTokens() as new:
                if self.trace.first_tokens_at is None:
                    self.trace.first_tokens_at = _now()
                await self._report_tokens(new)
            case pb.DecodeResponse() as message:
                await self._stream.write(message)
            case pb.DecodeRequest() as command:
                if command.WhichOneof("command") != "catch_up":
                    self._backlog.remove(command)
                await self._handle_command(command)
            case ChoicesEnded() | None:
                return True
        return False

    # Events of the engine and of the transfer.
    async def _on_grant(self, grant: Grant) -> None:
        if not isinstance(self._life, Queued):
            return  # A command to prefill locally was handled first: the blocks wait for no transfer.
        self._num_cached_blocks = grant.num_cached_blocks
        reservation = Reservation(
            request_id=self._request_id,
            block_ids=tuple(
                table[first:] for table, first in zip(grant.block_tables, grant.first_missing, strict=True)
            ),
            first_blocks=grant.first_missing,
            lease_s=self._lease_s,
            senders_ask=self._life.senders_ask,
            on_received=self._on_received,
            on_expired=self._on_expired,
        )
        await self._hand_out(await self._receiver.grant(reservation, attempt=self._attempt))

    async def _hand_out(self, ticket: Ticket) -> None:
        self._life, self._attempt = Receiving(ticket), ticket.attempt
        now = _now()
        traced = replace(ticket, trace=self.trace.granted(now))
        granted = pb.TicketGranted(
            ticket=sealed_ticket(traced, self._request_id, self._worker.seals),
            cached_tokens=self._num_cached_blocks * ticket.layout.block_size,
            reserve_s=now - self.trace.opened_at,
        )
        await self._stream.write(pb.DecodeResponse(ticket=granted))

    def _on_received(self, received: Received) -> None:
        """Decoding starts whether the prefill worker lives on or not: the session activates the KV by itself."""
        self._life = Runnable(_now(), is_received=True)
        self.trace.reception_ended(self._life.since, received)
        self._inbox.put(received)

    def _on_expired(self, error: PdserveError) -> None:
        self._worker.metrics.not_received(error)
        self._inbox.put(Failed(error=error))

    async def _activate(self, received: Received) -> None:
        try:
            if received.numerics_class != self._worker.numerics_class:
                key = secrets.token_bytes(HASH_KEY_BYTES)
                await self._worker.run(lambda: self._scheduler.migrating.isolate(self._request_id, key))
            await self._worker.run(lambda: self._scheduler.activate(self._request_id, received.first_tokens))
        except PdserveError as error:
            self._not_active = error
            raise
        self._not_active = None
        self._activation_decided.set()

    async def _report_tokens(self, new: RequestTokens) -> None:
        # More steps may have ended while the last message was written. A message reports as many steps as fit.
        for message in token_messages(new, self._inbox.more(RequestTokens)):
            await self._stream.write(pb.DecodeResponse(tokens=message))

    async def _report_started(self, started: Started) -> None:
        assert not isinstance(self._life, Receiving), "a request that waits for its KV is not computed"
        message = pb.DecodeStarted(
            prefilled_locally=started.request.prefilled_locally,
            cached_tokens=started.request.num_cached,
            queue_s=_now() - self._life.since,
            computing_s=_now() - started.started_at,
        )
        await self._stream.write(pb.DecodeResponse(started=message))

    # Commands of the router.
    async def _handle_command(self, command: pb.DecodeRequest) -> None:
        kind, tasks = command.WhichOneof("command"), self._tasks
        assert tasks is not None
        if kind == "keep_lease":
            if isinstance(self._life, Receiving):
                self._receiver.keep_lease(self._life.ticket.transfer_id)
        elif kind == "stop_choice":
            choice = command.stop_choice.choice_index
            await self._worker.run(lambda: self._scheduler.stop_choice(self._request_id, choice))
        elif kind == "renew_ticket":
            await self._renew(command.renew_ticket.attempt)
        elif kind == "catch_up":
            self._catching_up.take(command, tasks)
        elif kind == "hand_off":
            tasks.start(self._hand_off(command.hand_off), name=f"hand-off {self._request_id}")
        elif kind == "prefill_locally":
            await self._prefill_locally(command.prefill_locally)
        elif kind == "replicate_to":
            await self._transfers.replication.replicate_to(self._inbox.attempt_id, command.replicate_to)
        else:
            raise RequestError(
                f"Request {self._request_id} is being decoded already, but {kind or 'an empty message'} came. "
                "Send start once, as the first message of the stream."
            )

    async def _hand_off(self, command: pb.HandOff) -> None:
        """Sends the request's blocks while it runs on. The router decides when the request has moved."""
        sent = await self._transfers.migration.send(self._request_id, command)
        self._inbox.put(pb.DecodeResponse(handed_off=sent))

    def _is_stale(self, message: str, attempt: int, *, oldest: int) -> bool:
        if is_stale := attempt < oldest:
            self._worker.metrics.stale(message, overtaken(self._request_id, message, attempt, oldest))
        return is_stale

    async def _renew(self, attempt: int) -> None:
        if self._is_stale("renewal", attempt, oldest=self._attempt + 1):
            return
        match self._life:
            case Receiving(ticket=ticket):
                try:
                    renewed = await self._inbox.unless_failed(self._receiver.renew(ticket.transfer_id, attempt=attempt))
                except StaleError:
                    # The commit or the end of the lease won the race, and its event is in the inbox.
                    return
                await self._hand_out(renewed)
            case Runnable(is_received=True):
                return  # The commit won the race.
            case _:
                raise InvalidTransition(f"Request {self._request_id} has no ticket that could be renewed.")

    async def _prefill_locally(self, command: pb.PrefillLocally) -> None:
        if self._is_stale("prefill_locally", command.attempt, oldest=self._attempt):
            return
        if isinstance(self._life, Receiving):
            await self._receiver.abort(self._life.ticket.transfer_id)
        if self._has_received():
            return
        self._life = Runnable(_now(), is_received=False)
        self.trace.reception_ended(self._life.since)
        forced = tuple(command.forced_first_tokens)
        await self._worker.run(lambda: self._scheduler.prefill_locally(self._request_id, forced))

    def _has_received(self) -> bool:
        return isinstance(self._life, Runnable) and self._life.is_received

    async def _release(self) -> None:
        try:
            if isinstance(self._life, Receiving):
                # The transfer ends before its blocks are freed, since it may write to them until then.
                await self._receiver.abort(self._life.ticket.transfer_id)
        finally:
            self._activation_decided.set()
            await self._worker.run(lambda: self._scheduler.abort(self._request_id), ends=self._request_id)


def _now() -> float:
    return asyncio.get_running_loop().time()
