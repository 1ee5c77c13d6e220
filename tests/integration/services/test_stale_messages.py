"""Each kind of message that can be stale is dropped and counted, and the request that it names runs on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from decode_svc.scheduler import DecodeScheduler
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.ticket import Commit, commit_to_proto, signed_commit, ticket_from_proto
from pdserve.base.errors import PdserveError, PeerLost, StaleAttempt, StaleEpoch, StaleError
from pdserve.base.ids import RequestId, new_transfer_id
from pdserve.engine.step import RequestFailure, StepEvents
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.peers.seals import Purpose
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.serve.metrics import _STALE_MESSAGES, WorkerMetrics
from prefill_svc.scheduler import PrefillScheduler
from tests.integration.services.local_cluster import DEADLINE_S, LocalCluster, RouterRequest, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]


@dataclasses.dataclass(kw_only=True)
class Running:
    """A request whose ticket was renewed once, and whose commit is held back."""

    cluster: LocalCluster
    request: RouterRequest
    ticket: decode_pb2.Ticket


async def _refused(kind: type[PdserveError], work: Awaitable[object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(kind):
            await work


async def _commit(it: Running, **changed: Any) -> None:
    """Sends the request's own commit, apart from what is changed, with a valid MAC."""
    ticket = dataclasses.replace(ticket_from_proto(it.ticket), **changed)
    digests = (bytes(16),) * ticket.shape.num_messages
    commit = signed_commit(ticket, request_id=RequestId(it.request.request_id), digests=digests, first_tokens=(5,))
    plain = commit_to_proto(commit, it.cluster.decode.numerics_class)
    message = it.cluster.seals.seal(Purpose.COMMIT, it.cluster.decode.seal_name, plain)
    with mapped_rpc_errors("the decode worker"):
        await decode_pb2_grpc.DecodeServiceStub(it.cluster.decode_channel).Commit(message)


async def _commit_of_another_attempt(it: Running) -> None:
    await _refused(StaleAttempt, _commit(it, attempt=1))


async def _commit_of_another_epoch(it: Running) -> None:
    await _refused(StaleEpoch, _commit(it, epoch=it.ticket.epoch + 1))


async def _commit_of_another_transfer(it: Running) -> None:
    await _refused(StaleError, _commit(it, transfer_id=new_transfer_id()))


async def _renewal(it: Running) -> None:
    await it.request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))


async def _prefill_locally(it: Running) -> None:
    await it.request.send(prefill_locally=decode_pb2.PrefillLocally(attempt=1))


async def _start_on_decode(it: Running) -> None:
    same = it.cluster.request(PROMPT, it.request.request_id)
    await same.start(attempt=1)
    await _refused(StaleAttempt, same.event())


async def _start_on_prefill(it: Running) -> None:
    same = it.cluster.request(PROMPT, it.request.request_id)
    await _refused(StaleAttempt, same.prefill(it.ticket))


async def _nothing(it: Running) -> None:
    """The events come by themselves."""


#: Tier, message, reason, and what sends such a message.
CASES: tuple[tuple[str, str, str, Callable[[Running], Awaitable[None]]], ...] = (
    ("decode", "start", "stale_attempt", _start_on_decode),
    ("decode", "event", "stale_attempt", _nothing),
    ("decode", "commit", "stale_attempt", _commit_of_another_attempt),
    ("decode", "commit", "stale_epoch", _commit_of_another_epoch),
    ("decode", "commit", "stale_error", _commit_of_another_transfer),
    ("decode", "renewal", "stale_attempt", _renewal),
    ("decode", "prefill_locally", "stale_attempt", _prefill_locally),
    ("prefill", "start", "stale_attempt", _start_on_prefill),
    ("prefill", "event", "stale_attempt", _nothing),
)


@pytest.mark.parametrize(("tier", "message", "reason", "send"), CASES)
async def test_a_stale_message_is_counted_and_the_request_runs_on(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    message: str,
    reason: str,
    send: Callable[[Running], Awaitable[None]],
) -> None:
    held = _Held(monkeypatch)
    if message == "event":
        _add_stale_events(monkeypatch, tier)
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        await request.ticket()
        await request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))
        it = Running(cluster=cluster, request=request, ticket=await request.ticket())
        prefilling = asyncio.create_task(request.prefill(it.ticket))
        async with asyncio.timeout(DEADLINE_S):
            await held.has_come.wait()
            await send(it)
            if send is not _nothing:
                await held.is_stale.wait()
        held.release.set()
        await prefilling
        tokens = await request.finish()
        counted = _counted(cluster)
        assert counted.pop((tier, message, reason)) >= 1
        assert not any(counted.values()), counted
        monkeypatch.undo()
        assert tokens == await cluster.local(PROMPT)
        await cluster.all_free()


def test_every_message_that_is_counted_is_sent() -> None:
    counted = {(tier, message) for tier, messages in _STALE_MESSAGES.items() for message in messages}
    assert {case[:2] for case in CASES} == counted


class _Held:
    """Holds the prefill worker's commit back, and those of the test not, which come later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_come, self.release = asyncio.Event(), asyncio.Event()
        #: A stale message was met, on any worker.
        self.is_stale = asyncio.Event()
        commit_now, count = Receiver.commit, WorkerMetrics.stale

        async def commit(receiver: Receiver, commit: Commit) -> Any:
            if not self.has_come.is_set():
                self.has_come.set()
                await self.release.wait()
            return await commit_now(receiver, commit)

        def stale(metrics: WorkerMetrics, message: str, error: PdserveError) -> None:
            count(metrics, message, error)
            self.is_stale.set()

        monkeypatch.setattr(Receiver, "commit", commit)
        monkeypatch.setattr(WorkerMetrics, "stale", stale)


def _add_stale_events(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    """Each step of the tier also reports that an older attempt of its requests has failed."""
    scheduler = DecodeScheduler if tier == "decode" else PrefillScheduler
    update = scheduler.update

    def updated(*arguments: Any) -> StepEvents:
        events = update(*arguments)
        error = PeerLost("This is the failure of an older attempt.")
        failed = [RequestFailure(request_id=each.request_id, attempt=0, error=error) for each in events.tokens]
        return dataclasses.replace(events, failures=(*events.failures, *failed))

    monkeypatch.setattr(scheduler, "update", updated)


def _counted(cluster: LocalCluster) -> dict[tuple[str, str, str], float]:
    """Stale messages of both workers, by tier, message and reason."""
    return {
        (sample.labels["tier"], sample.labels["message"], sample.labels["reason"]): sample.value
        for worker in (cluster.prefill, cluster.decode)
        for metric in worker.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "pdserve_stale_messages_total"
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))
