"""A prefill and a decode worker in this process: real gRPC, real engines on a tiny model, blocks over `inproc`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_svc.config import DecodeConfig
from decode_svc.scheduler import DecodeScheduler
from decode_svc.service import DecodeService
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.sender import OutgoingTransfer
from kvtransfer.transport import Transport
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.ids import TransferId, WorkerId, new_epoch
from pdserve.base.sampling import SamplingParams
from pdserve.base.tasks import service_group
from pdserve.base.trace_context import TraceContext, traceparent_of
from pdserve.base.wire import error_from_wire, sampling_to_wire
from pdserve.net.admin import Health
from pdserve.net.rpc import GrpcPort, mapped_rpc_errors, open_channel, serve_grpc_at, trace_metadata
from pdserve.net.streams import MessageStream, open_stream
from pdserve.peers.peer_tls import peer_tls
from pdserve.peers.registry import Tier
from pdserve.peers.seals import Purpose, Seals
from pdserve.peers.secret import read_secret
from pdserve.redis.store import Store
from pdserve.v1 import common_pb2, decode_pb2, diagnostics_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from pdserve.worker.config import WorkerConfig
from pdserve.worker.serve.diagnostics import DiagnosticsService
from pdserve.worker.serve.grammars import Grammars
from pdserve.worker.serve.loaded_model import load_model
from pdserve.worker.serve.message_limits import max_call_bytes
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.role_change import RoleChange
from pdserve.worker.serve.worker import TierService, Worker
from prefill_svc.config import PrefillConfig
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.service import PrefillService
from tests.support.deadline import DEADLINE_S
from tests.support.virtual_time import advance
from worker_svc.service import RolesService

ALWAYS_LOCAL = 2**32 - 1
#: Lease of tests that move the clock forward: long enough to be kept in time on a busy machine.
LEASE_S = 10.0
ROUTER = "router"


@asynccontextmanager
async def running_worker(
    config: WorkerConfig, tier: Tier, transport: Transport, build: Callable[[Worker], TierService]
) -> AsyncIterator[tuple[Worker, str, str]]:
    """A worker as `serve_worker` runs it, without a registry and without signals."""
    metrics = WorkerMetrics(model_name="tiny", tier=tier)
    async with AsyncExitStack() as stack, service_group() as tasks:
        grammars = Grammars(config.model_dir)
        stack.callback(grammars.close)
        model = await asyncio.to_thread(load_model, config)
        stack.callback(model.close)
        worker = Worker(
            config=config,
            tier=tier,
            worker_id=WorkerId(tier),
            epoch=new_epoch(),
            model=model,
            grammars=grammars,
            transport=transport,
            metrics=metrics,
            tasks=tasks,
            seals=Seals(read_secret(config.cluster_secret_file), on_refused=metrics.peer_refused),
            tls=peer_tls(config),
        )
        service = build(worker)
        # No test of these workers needs Redis, except to see that it is away.
        diagnostics = DiagnosticsService(worker, Store(config.redis_url or "redis://127.0.0.1:9"))
        health = Health()
        health.not_ready = None
        diagnostics.role_change = RoleChange(worker, service, health, _published)

        def register(server: grpc.aio.Server) -> None:
            service.register(server)
            diagnostics_pb2_grpc.add_DiagnosticsServiceServicer_to_server(diagnostics, server)

        async with worker.computing(service):
            try:
                credentials = None if worker.tls is None else worker.tls.server_credentials()
                port = GrpcPort(
                    host="127.0.0.1",
                    port=0,
                    flag="--grpc-port",
                    credentials=credentials,
                    max_request_bytes=max_call_bytes(worker.model),
                )
                async with serve_grpc_at(register, [service.name], port, grace_s=0) as (address, _):
                    diagnostics.grpc_address = address
                    stream_address = await service.start(address)
                    worker.calls.accept()
                    yield worker, address, stream_address
            finally:
                await service.close()


async def _published() -> None:
    """No registry is there."""


class RouterRequest:
    """A request on the decode worker, from its router's point of view."""

    def __init__(self, cluster: LocalCluster, prompt: list[int], params: SamplingParams, request_id: str) -> None:
        self._cluster = cluster
        self.prompt = prompt
        self.params = params
        self.request_id = request_id
        self._stream: MessageStream[decode_pb2.DecodeResponse] | None = None
        #: Tokens of each choice so far.
        self.tokens: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
        self._ended: set[int] = set()

    def ref(self, attempt: int = 1) -> common_pb2.RequestRef:
        return common_pb2.RequestRef(request_id=self.request_id, attempt=attempt, router_id=ROUTER)

    async def start(
        self,
        *,
        local_prefill_threshold: int = 0,
        attempt: int = 1,
        trace: TraceContext | None = None,
        senders_ask: bool = True,
    ) -> None:
        start = decode_pb2.DecodeStart(
            ref=self.ref(attempt),
            prompt_token_ids=self.prompt,
            sampling=sampling_to_wire(self.params),
            local_prefill_threshold=local_prefill_threshold,
            traceparent=traceparent_of(trace),
            senders_ask=senders_ask,
        )
        await self.send(start=self._cluster.seals.seal(Purpose.START, self._cluster.decode.seal_name, start))

    async def stop_choice(self, choice: int) -> None:
        """Stop a choice: neither more of its tokens nor its end is reported."""
        self._ended.add(choice)
        await self.send(stop_choice=decode_pb2.StopChoice(choice_index=choice))

    async def send(self, **command: Any) -> None:
        if self._stream is None:
            self._stream = await open_stream(
                self._cluster.decode_streams, decode_pb2.DecodeResponse.FromString, self._cluster.decode.tls
            )
        await self._stream.write(decode_pb2.DecodeRequest(**command))

    async def event(self) -> decode_pb2.DecodeResponse:
        """The next event that is no sign of life. Raises the worker's error."""
        assert self._stream is not None
        event = None
        while event is None or event.WhichOneof("event") in ("keep_alive", "progress"):
            event = await self._stream.read(DEADLINE_S)
            assert event is not None, "the decode worker closed the stream"
        if event.HasField("failed"):
            raise error_from_wire(event.failed)
        return event

    async def ticket(self) -> decode_pb2.Ticket:
        event = await self.event()
        assert event.WhichOneof("event") == "ticket", event
        return event.ticket.ticket

    async def finish(self) -> dict[int, list[int]]:
        """All tokens, once every choice has ended."""
        while len(self._ended) < self.params.n:
            for choice in (await self.event()).tokens.choices:
                self.take(choice)
        self.cancel()
        return self.tokens

    def take(self, choice: common_pb2.ChoiceTokens) -> None:
        mine = self.tokens[choice.choice_index]
        assert choice.first_index == len(mine), f"{choice} does not follow {mine}"
        mine.extend(choice.token_ids)
        if choice.finish_reason:
            self._ended.add(choice.choice_index)

    def cancel(self) -> None:
        """Closes the connection, as a router does when it has all tokens or gives up."""
        assert self._stream is not None
        self._stream.close()

    async def prefill(
        self,
        ticket: decode_pb2.Ticket | None,
        *,
        forced: tuple[int, ...] = (),
        channel: grpc.aio.Channel | None = None,
        keeps_lease: bool = False,
        trace: TraceContext | None = None,
    ) -> prefill_pb2.PrefillDone:
        """Has the prompt computed and handed over, and keeps the first tokens. Raises the worker's error.

        With `keeps_lease`, progress is passed on to the decode worker, as a router does.
        """
        call = self.prefill_call(ticket, forced=forced, channel=channel, trace=trace)
        async with asyncio.timeout(DEADLINE_S):
            with ExitStack() as stack:
                # A cancellation between two reads does not reach the worker by itself.
                stack.callback(call.cancel)
                stack.enter_context(mapped_rpc_errors("the prefill worker"))
                async for event in call:
                    if keeps_lease and event.HasField("progress"):
                        await self.send(keep_lease=decode_pb2.KeepLease())
                    for choice in event.first_token.choices:
                        if not self.tokens[choice.choice_index]:
                            self.take(choice)
                    if event.HasField("done"):
                        return event.done
        raise AssertionError("the prefill worker ended the stream without being done")

    def prefill_call(
        self,
        ticket: decode_pb2.Ticket | None,
        *,
        forced: tuple[int, ...] = (),
        channel: grpc.aio.Channel | None = None,
        trace: TraceContext | None = None,
        attempt: int = 1,
        retains_prompt: bool = False,
    ) -> grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
        """The call that `prefill` reads. A ticket names its attempt."""
        request = prefill_pb2.PrefillRequest(
            ref=self.ref(ticket.attempt if ticket is not None else attempt),
            prompt_token_ids=self.prompt,
            sampling=sampling_to_wire(self.params),
            ticket=ticket,
            forced_first_tokens=forced,
            retains_prompt=retains_prompt,
        )
        request = self._cluster.seals.seal(Purpose.PROMPT, self._cluster.prefill.seal_name, request)
        stub = prefill_pb2_grpc.PrefillServiceStub(channel or self._cluster.prefill_channel)
        return stub.Prefill(request, metadata=trace_metadata(trace))


class KeptLeases:
    """Notes when senders and decode workers in this process keep leases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_senders = self._note(monkeypatch, OutgoingTransfer)
        self._of_decode_workers = self._note(monkeypatch, Receiver)

    @staticmethod
    def _note(monkeypatch: pytest.MonkeyPatch, end: type[Receiver] | type[OutgoingTransfer]) -> asyncio.Queue[float]:
        times: asyncio.Queue[float] = asyncio.Queue()
        keep_lease = end.keep_lease

        def noted(transfer: Any, *transfer_id: TransferId) -> None:
            keep_lease(transfer, *transfer_id)
            times.put_nowait(asyncio.get_running_loop().time())

        monkeypatch.setattr(end, "keep_lease", noted)
        return times

    async def since(self, at: float, *, by_sender: bool = False) -> None:
        """Returns once the decode worker, and the sender, have kept the lease at `at` (event loop time) or later."""
        async with asyncio.timeout(DEADLINE_S):
            for times in (self._of_senders, self._of_decode_workers) if by_sender else (self._of_decode_workers,):
                while await times.get() < at:
                    pass

    async def outlive(self, lease_s: float) -> None:
        """Moves the clock forward by more than two leases, which do not end if both ends keep them in time."""
        for _ in range(5):
            await self.since(advance(lease_s / 2), by_sender=True)


def hold_steps(
    monkeypatch: pytest.MonkeyPatch,
    *,
    after: int,
    until: str,
    scheduler: type[DecodeScheduler] | type[PrefillScheduler] = DecodeScheduler,
) -> None:
    """Holds the decode worker after this many more steps, until its scheduler's method `until` has been called.

    A tiny model would otherwise compute a whole answer before a test can react to its first tokens. Calls to the step
    thread run meanwhile, and what was computed is reported.
    """
    left: int | None = after
    has_work, update, awaited = scheduler.has_work, scheduler.update, getattr(scheduler, until)

    def counted(*arguments: Any) -> Any:
        nonlocal left
        if left is not None:
            left -= 1
        return update(*arguments)

    def released(*arguments: Any) -> Any:
        nonlocal left
        left = None
        return awaited(*arguments)

    def has_work_now(held: Any) -> bool:
        return left != 0 and has_work(held)

    monkeypatch.setattr(scheduler, "has_work", has_work_now)
    monkeypatch.setattr(scheduler, "update", counted)
    monkeypatch.setattr(scheduler, until, released)


@dataclass(slots=True)
class LocalCluster:
    """Both workers, and the channels and addresses to reach them."""

    prefill: Worker
    decode: Worker
    prefill_channel: grpc.aio.Channel
    decode_channel: grpc.aio.Channel
    prefill_address: str
    decode_address: str
    decode_streams: str
    #: What the router seals with.
    seals: Seals
    #: Where the prefill worker takes requests after a change of its role.
    prefill_streams: str = ""
    #: The prefill worker's own methods, as its process calls them.
    prefill_service: TierService | None = None
    count: int = 0

    def with_roles_swapped(self) -> LocalCluster:
        """The same workers, as seen by a router after both have changed their roles."""
        return replace(
            self,
            prefill=self.decode,
            decode=self.prefill,
            prefill_channel=self.decode_channel,
            decode_channel=self.prefill_channel,
            prefill_address=self.decode_address,
            decode_address=self.prefill_address,
            decode_streams=self.prefill_streams,
            prefill_streams=self.decode_streams,
            count=self.count + 100,
        )

    def request(self, prompt: list[int], request_id: str | None = None, **params: Any) -> RouterRequest:
        """A new request that is not started yet."""
        self.count += 1
        sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "seed": 5} | params))
        return RouterRequest(self, prompt, sampling, request_id or f"r{self.count}")

    async def local(self, prompt: list[int], **params: Any) -> dict[int, list[int]]:
        """The tokens that the decode worker computes by itself, which handed-over output is compared with."""
        request = self.request(prompt, **params)
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        return await request.finish()

    async def all_free(self) -> None:
        """Returns once every block of both workers is free and no call is left; fails after the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            for worker in (self.prefill, self.decode):
                await worker.calls.wait_idle()
                free = await worker.run(lambda worker=worker: worker.model.pool.num_free)
                assert free == worker.model.pool.num_blocks


@asynccontextmanager
async def running_cluster(
    model: Path,
    *,
    prefill_transport: Transport | None = None,
    decode_transport: Transport | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    have_roles: bool = False,
) -> AsyncIterator[LocalCluster]:
    """Both workers on a tiny model; the dictionaries change their settings.

    With `have_roles` both can change their roles, and have the settings of decode workers.
    """
    common: dict[str, Any] = {
        "model": str(model),
        "redis_url": "",
        "block_size": 4,
        "kv_cache_memory": 64 * 1024,
        "threads": 1,
    }
    ours, theirs = prefill_transport or InprocTransport(), decode_transport or InprocTransport()
    d_config = DecodeConfig(**(common | {"lease_s": 5.0} | (decode or {})))
    of_prefill = common | {"max_num_batched_tokens": 8} | (prefill or {})
    p_config: WorkerConfig = (
        DecodeConfig(**{"lease_s": 5.0} | of_prefill) if have_roles else PrefillConfig(**of_prefill)
    )

    of_prefill_worker: list[TierService] = []

    def build_prefill(worker: Worker) -> TierService:
        build = RolesService if isinstance(p_config, DecodeConfig) else PrefillService
        of_prefill_worker.append(build(worker, p_config))  # type: ignore[arg-type]
        return of_prefill_worker[0]

    def build_decode(worker: Worker) -> TierService:
        return RolesService(worker, d_config) if have_roles else DecodeService(worker, d_config)

    async with AsyncExitStack() as stack:
        for transport in (ours, theirs):
            stack.push_async_callback(transport.close)
        d_worker, d_address, d_streams = await stack.enter_async_context(
            running_worker(d_config, "decode", theirs, build_decode)
        )
        p_worker, p_address, p_streams = await stack.enter_async_context(
            running_worker(p_config, "prefill", ours, build_prefill)
        )
        p_channel = await stack.enter_async_context(open_channel(p_address, p_worker.tls))
        d_channel = await stack.enter_async_context(open_channel(d_address, d_worker.tls))
        seals = Seals(read_secret(d_config.cluster_secret_file))
        yield LocalCluster(
            p_worker,
            d_worker,
            p_channel,
            d_channel,
            p_address,
            d_address,
            d_streams,
            seals,
            prefill_streams=p_streams,
            prefill_service=of_prefill_worker[0],
        )
