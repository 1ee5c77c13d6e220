"""Copies new blocks of running requests to other decode workers, while no handover needs the wire."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from decode_svc.block_sender import BlockSender
from decode_svc.replication.replicas import CopyBatch, Replicas
from decode_svc.session_events import SessionEvent
from pdserve.base.addresses import is_host_port
from pdserve.base.errors import Draining, NoFreeBlocks, PdserveError, RequestError, reason_of
from pdserve.base.ids import AttemptId, Epoch, RequestId, WorkerId
from pdserve.base.logs import get_logger
from pdserve.engine.step import StepOutput
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.peers.seals import Purpose, receiver_name
from pdserve.v1 import decode_pb2 as pb
from pdserve.v1 import decode_pb2_grpc as pb_grpc
from pdserve.worker.serve.inboxes import Inboxes
from pdserve.worker.serve.worker import Worker

log = get_logger(__name__)

#: Number of intervals that a request runs before its blocks are copied. A younger one costs little to compute again.
_MIN_AGE = 1
#: Pause before a router is asked again to name a worker for copies, and pause after a round that failed.
_AGAIN_S = 5.0
#: Maximum number of rounds in a row that are skipped while transfers are active.
_MAX_SKIPPED = 4
#: Time for the other worker to answer.
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """The incarnation of a decode worker that copies go to."""

    worker_id: WorkerId
    epoch: Epoch
    grpc_address: str

    @classmethod
    def of(cls, message: pb.ReplicateTo) -> ReplicaTarget:
        """Raises `RequestError` for an address or an epoch that no worker can have."""
        if not is_host_port(message.grpc_address) or not message.epoch:
            raise RequestError(f"replicate_to names no worker: {message.worker_id[:40]!r}, {message.grpc_address!r}.")
        return cls(WorkerId(message.worker_id), Epoch(message.epoch), message.grpc_address)


class ReplicationPolicy:
    """Which requests have copies, and where. Pure; times are of one monotonic clock, in seconds."""

    def __init__(self, min_age_s: float) -> None:
        """Requests that have run for less than `min_age_s` seconds have no copies."""
        self._min_age_s = min_age_s
        self._targets: dict[AttemptId, ReplicaTarget] = {}
        self._failed: dict[AttemptId, Epoch] = {}
        self._since: dict[AttemptId, float] = {}
        self._wanted_at: dict[AttemptId, float] = {}

    def name(self, attempt_id: AttemptId, target: ReplicaTarget) -> None:
        """A router has named the worker for the copies of a request."""
        self._targets[attempt_id] = target

    def lose(self, target: ReplicaTarget) -> list[AttemptId]:
        """The worker cannot take copies. Returns the requests that need another one."""
        lost = [attempt_id for attempt_id, each in self._targets.items() if each == target]
        for attempt_id in lost:
            del self._targets[attempt_id]
            self._failed[attempt_id] = target.epoch
        return lost

    def update(self, running: Collection[AttemptId], now: float) -> dict[AttemptId, Epoch]:
        """The requests that want a worker for copies now, each with the epoch of the worker that has failed, or 0."""
        self._since = {each: self._since.get(each, now) for each in running}
        for known in (self._targets, self._failed, self._wanted_at):
            for attempt_id in known.keys() - self._since.keys():
                del known[attempt_id]
        due = [
            attempt_id
            for attempt_id, since in self._since.items()
            if attempt_id not in self._targets
            and now - since >= self._min_age_s
            and now - self._wanted_at.get(attempt_id, float("-inf")) >= _AGAIN_S
        ]
        self._wanted_at |= dict.fromkeys(due, now)
        return {attempt_id: self._failed.get(attempt_id, Epoch(0)) for attempt_id in due}

    def at(self, target: ReplicaTarget) -> frozenset[AttemptId]:
        """The requests whose copies go to this worker."""
        return frozenset(attempt_id for attempt_id, each in self._targets.items() if each == target)

    def by_target(self) -> Mapping[ReplicaTarget, list[AttemptId]]:
        """The requests for whose copies a worker is named, by this worker."""
        found: dict[ReplicaTarget, list[AttemptId]] = {}
        for attempt_id, target in self._targets.items():
            found.setdefault(target, []).append(attempt_id)
        return found


class ReplicationSource:
    """All copies out of a decode worker. Belongs to the event loop."""

    def __init__(
        self,
        worker: Worker,
        replicas: Replicas,
        sender: BlockSender,
        inboxes: Inboxes[SessionEvent],
        *,
        interval_s: float,
    ) -> None:
        """With `interval_s` 0, nothing is copied."""
        self._worker = worker
        self._replicas = replicas
        self._sender = sender
        self._inboxes = inboxes
        # NCCL needs a communicator per pair of workers. While strangers are accepted, each request has its own hashes.
        is_useful = worker.transport.name != "nccl" and not worker.seals.accepts_strangers
        self._interval_s = interval_s if is_useful else 0.0
        self._policy = ReplicationPolicy(_MIN_AGE * self._interval_s)
        self._is_running = asyncio.Event()
        self._names = itertools.count()

    def start(self) -> None:
        """Begins to copy."""
        if self._interval_s:
            self._worker.tasks.start(self._run(), name="replication")

    def after_step(self, output: StepOutput) -> None:
        """Starts a round if sequences run: a worker that computes nothing is not woken."""
        if output.load.num_running:
            self._is_running.set()

    async def replicate_to(self, attempt_id: AttemptId, message: pb.ReplicateTo) -> None:
        """A router names a worker for a request's copies. Raises `RequestError` for a worker that cannot exist."""
        target = ReplicaTarget.of(message)
        if target.epoch != self._worker.epoch:
            await self._worker.run(lambda: self._replicas.forget(attempt_id))
            self._policy.name(attempt_id, target)
            self._is_running.set()

    async def _run(self) -> None:
        skipped = 0
        while True:
            await self._is_running.wait()
            self._is_running.clear()
            await asyncio.sleep(self._interval_s)
            if self._worker.metrics.num_active_transfers and skipped < _MAX_SKIPPED:
                skipped += 1
                self._is_running.set()
                continue
            skipped = 0
            try:
                await self._round()
            except Draining:  # The step loop has ended, and with it all that could be copied.
                return
            except Exception as error:  # noqa: BLE001 - copies are worth no worker
                log.error("replication_failed", exc=error)
                await asyncio.sleep(_AGAIN_S)  # A round that follows at once would fail again.

    async def _round(self) -> None:
        running = await self._worker.run(self._replicas.running)
        if running:  # Another round follows, even if nothing is computed until then.
            self._is_running.set()
        for attempt_id, failed in self._policy.update(running, asyncio.get_running_loop().time()).items():
            wanted = pb.ReplicaWanted(failed_epoch=failed)
            self._inboxes.put(*attempt_id, pb.DecodeResponse(replica_wanted=wanted))
        for target, attempts in self._policy.by_target().items():
            there = set[AttemptId]()
            take = partial(self._replicas.take, attempts)
            async with self._worker.holding(take, partial(self._replicas.let_go, there=there)) as batch:
                if batch.blocks and await self._copy(target, batch):
                    there |= self._policy.at(target)  # A router may have named another worker meanwhile.

    async def _copy(self, target: ReplicaTarget, batch: CopyBatch) -> bool:
        """Whether the other worker has all of the blocks now."""
        metrics = self._worker.metrics
        try:
            return await self._send(target, batch)
        except NoFreeBlocks as error:
            metrics.replicated(reason_of(error))
        except PdserveError as error:
            metrics.replicated(reason_of(error))
            log.info("replica_lost", worker=target.worker_id, reason=error)
            await self._lose(target)
        except Exception as error:  # noqa: BLE001 - copies are worth no worker
            metrics.replicated("failed")
            log.error("replica_lost", worker=target.worker_id, exc=error)
            await self._lose(target)
        return False

    async def _lose(self, target: ReplicaTarget) -> None:
        """Sends no more copies to the worker. Later rounds ask the routers of its requests for another one."""
        for attempt_id in self._policy.lose(target):
            await self._worker.run(partial(self._replicas.forget, attempt_id))

    async def _send(self, target: ReplicaTarget, batch: CopyBatch) -> bool:
        metrics = self._worker.metrics
        name = RequestId(f"replica/{self._worker.worker_id}/{self._worker.epoch}/{next(self._names)}")
        answer = await self._announce(target, name, batch)
        if not answer.HasField("ticket"):
            metrics.replicated("not_needed")
            return True
        ticket = self._sender.ticket(answer.ticket, name)
        missing = list(answer.missing)
        if len(missing) != ticket.num_blocks or any(each >= len(batch.blocks) for each in missing):
            raise RequestError(f"Decode worker {target.worker_id} wants blocks that were not offered.")
        stats = await self._sender.send(name, ticket, [batch.blocks[each] for each in missing], choices=1)
        metrics.sent(stats.sent_bytes, stats.sent_blocks, stats.busy_s, self._worker.transport.name)
        metrics.replicated("committed")
        return not answer.is_partial

    async def _announce(self, target: ReplicaTarget, name: RequestId, batch: CopyBatch) -> pb.ReplicateResponse:
        request = pb.ReplicateRequest(
            request_id=name,
            block_hashes=batch.hashes,
            numerics_class=self._worker.numerics_class,
            senders_ask=True,
        )
        receiver = receiver_name(target.worker_id, target.epoch)
        sealed = self._worker.seals.seal(Purpose.REPLICA, receiver, request)
        async with self._sender.channels.use(target.worker_id, target.epoch, target.grpc_address) as channel:
            with mapped_rpc_errors(f"decode worker {target.worker_id}"):
                stub = pb_grpc.DecodeServiceStub(channel)
                answer: pb.ReplicateResponse = await stub.Replicate(sealed, timeout=_ANSWER_S)
                return answer
