"""Copies of blocks that other decode workers send here, as one transfer each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from decode_svc.replication.replicas import MAX_BLOCKS, CopySpace, Replicas
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.sealed_ticket import sealed_ticket
from kvtransfer.handover.ticket import Commit
from pdserve.base.block_hash import HASH_BYTES
from pdserve.base.errors import Draining, PdserveError, RequestError, StaleError
from pdserve.base.ids import BlockHash, BlockId, RequestId
from pdserve.base.logs import get_logger
from pdserve.peers.seals import Purpose
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.worker import Worker

log = get_logger(__name__)

#: Maximum length of a transfer's name, in characters. Names that workers make are much shorter.
_MAX_NAME = 512
#: Copies take milliseconds. A transfer without progress is given up soon, since it holds blocks.
_LEASE_S = 5.0
_ATTEMPT = 1


class ReplicationTarget:
    """All copies on their way to this worker. Belongs to the event loop."""

    def __init__(self, worker: Worker, replicas: Replicas, receiver: Callable[[], Receiver]) -> None:
        self._worker = worker
        self._replicas = replicas
        self._receiver = receiver
        self._open: set[RequestId] = set()

    def of(self, name: RequestId) -> ReplicationTarget | None:
        """What takes the commit of a transfer with this name; None: there is no such transfer."""
        return self if name in self._open else None

    async def reserve(self, request: pb.ReplicateRequest) -> pb.ReplicateResponse:
        """The ticket for the blocks that are missing here. Blocks held for copies that do not arrive in time are freed.

        Raises: PeerRefused; RequestError; StaleError for blocks of another numerics class; NoFreeBlocks; Draining.
        """
        request = self._worker.seals.open(Purpose.REPLICA, self._worker.seal_name, request)
        hashes = _checked(request)
        self._require_same_bits(request.numerics_class)
        if self._worker.seals.accepts_strangers:
            raise StaleError("This worker accepts messages without a seal for now: no copy would be found here.")
        if self._worker.tasks.stopping:
            raise Draining("The worker drains, and takes no copies.")
        name = RequestId(request.request_id)
        reserved: list[CopySpace] = []
        try:
            await self._worker.run(lambda: reserved.append(self._replicas.reserve(name, hashes)))
            [room] = reserved
            if not room.blocks:
                return pb.ReplicateResponse()
            reservation = replace(self._reservation(name, room.blocks), senders_ask=request.senders_ask)
            ticket = await self._receiver().grant(reservation, attempt=_ATTEMPT)
        except BaseException:
            if reserved:  # Blocks are also held if the caller was cancelled while the step thread reserved them.
                await self._worker.run(lambda: self._replicas.drop(name))
            raise
        self._open.add(name)  # From now on, the end of the transfer frees the blocks.
        sealed = sealed_ticket(ticket, name, self._worker.seals)
        return pb.ReplicateResponse(ticket=sealed, missing=room.missing, is_partial=room.is_partial)

    async def commit(self, commit: Commit) -> Received:
        """Waits until the copies are verified. Raises what `Receiver.commit` does."""
        self._require_same_bits(commit.numerics_class)
        return await self._receiver().commit(commit)

    def _require_same_bits(self, numerics_class: str) -> None:
        if numerics_class != self._worker.numerics_class:
            raise StaleError(
                f"Copies of blocks of numerics class {numerics_class} are of no use to this worker, whose class is "
                f"{self._worker.numerics_class}. Copies go to workers of the same class only."
            )

    def _reservation(self, name: RequestId, blocks: Sequence[BlockId]) -> Reservation:
        def received(_: Received) -> None:
            self._end(name, is_there=True)

        def expired(error: PdserveError) -> None:
            self._worker.metrics.not_received(error)
            self._end(name, is_there=False)

        return Reservation(
            request_id=name,
            block_ids=(blocks,),
            first_blocks=(0,),
            lease_s=_LEASE_S,
            on_received=received,
            on_expired=expired,
        )

    def _end(self, name: RequestId, *, is_there: bool) -> None:
        """The transfer is over, and nothing writes to its blocks any more."""
        self._open.discard(name)
        end = self._replicas.arrived if is_there else self._replicas.drop
        # The call is not awaited: the step thread runs it before any command of a request that needs these blocks.
        future = self._worker.post(lambda: end(name))
        future.add_done_callback(_log_failure)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, Draining):
        log.error("copies_not_ended", reason=error)


def _checked(request: pb.ReplicateRequest) -> list[BlockHash]:
    """The hashes. Raises `RequestError` for a message that no decode worker sends."""
    hashes = [BlockHash(each) for each in request.block_hashes]
    if not 0 < len(request.request_id) <= _MAX_NAME:
        raise RequestError(f"replicate has a request id of {len(request.request_id)} characters, not 1 to {_MAX_NAME}.")
    if not 0 < len(hashes) <= MAX_BLOCKS:
        raise RequestError(f"replicate has {len(hashes)} blocks, not 1 to {MAX_BLOCKS}.")
    for each in hashes:
        if len(each) != HASH_BYTES:
            raise RequestError(f"replicate has a hash of {len(each)} bytes, not {HASH_BYTES}.")
    if len(set(hashes)) < len(hashes):
        raise RequestError(f"replicate has {len(hashes) - len(set(hashes))} hashes twice.")
    return hashes
