"""The life of a worker process, whatever its tier: load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import grpc

from pdserve.base.collector import exempt_all
from pdserve.base.errors import Draining
from pdserve.base.ids import WorkerId, new_epoch
from pdserve.base.logs import get_logger
from pdserve.base.tasks import service_group, stop_event_on_signals
from pdserve.base.timing import process_age_s, timed
from pdserve.net import notify
from pdserve.net.admin import Health, bound_socket, serve_admin
from pdserve.net.rpc import GrpcHealth, GrpcPort, serve_grpc_at
from pdserve.observe import audit
from pdserve.observe.tracing.setup import span_counters, tracing
from pdserve.peers.deaths import note_death
from pdserve.peers.peer_tls import peer_tls
from pdserve.peers.registry import Registrar, Tier
from pdserve.peers.seals import Seals
from pdserve.peers.secret import read_secret
from pdserve.redis.store import Store
from pdserve.v1 import diagnostics_pb2_grpc
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.claims import claim_when_free
from pdserve.worker.load.populate import populating
from pdserve.worker.serve.announce import WorkerAddresses, announce, describe
from pdserve.worker.serve.diagnostics import DiagnosticsService
from pdserve.worker.serve.fatal_signals import reporting_fatal_signals
from pdserve.worker.serve.grammars import Grammars
from pdserve.worker.serve.last_exit import ExitNote, noting_exit
from pdserve.worker.serve.loaded_model import LoadedModel, load_model
from pdserve.worker.serve.manual_drain import ManualDrain
from pdserve.worker.serve.message_limits import max_call_bytes
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.opened_transport import opened_transport
from pdserve.worker.serve.role_change import RoleChange
from pdserve.worker.serve.stall_watch import watch_stalls
from pdserve.worker.serve.worker import TierService, Worker

log = get_logger(__name__)

#: Time for answers to requests that a worker gives up at the end of its drain.
_LAST_WORDS_S = 1.0


async def serve_worker(config: WorkerConfig, tier: Tier, build: Callable[[Worker], TierService]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises what ended the step loop: the process must end with it."""
    log.info("modules_imported", process_age_s=round(process_age_s(), 2))
    stop = stop_event_on_signals(audit.stop_requested)
    health, metrics = Health(), WorkerMetrics(model_name=config.model_name, tier=tier)
    metrics.watch(health)
    seals = Seals(read_secret(config.cluster_secret_file), on_refused=metrics.peer_refused)
    tls = peer_tls(config)
    admin = bound_socket(config.host, config.http_port, flag="--http-port")
    async with serve_admin(health, metrics.registry, admin) as http_address, AsyncExitStack() as stack:
        if (claimed := await claim_when_free(config, stack, stop, health)) is None:
            return
        config = claimed
        tracer = await stack.enter_async_context(tracing(config, f"pdserve-{tier}", config.worker_id))
        metrics.read(*span_counters(tracer))
        store = await stack.enter_async_context(
            Store(config.redis_url, prefix=config.redis_prefix, on_change=health.watch("redis"))
        )
        note = await stack.enter_async_context(_exit_note(config, store, metrics))
        model, grammars = await _load(config, stack)
        transport = await stack.enter_async_context(opened_transport(config, seals, tls, metrics))
        tasks = await stack.enter_async_context(service_group())
        make = partial(Worker, config=config, tier=tier, worker_id=_worker_id(config, tier), epoch=new_epoch())
        make = partial(make, model=model, grammars=grammars, transport=transport, metrics=metrics, tasks=tasks)
        worker = await _made(partial(make, seals=seals, tls=tls, tracer=tracer))
        service = build(worker)
        notify.status("warming up")
        served = _served(service, diagnostics := DiagnosticsService(worker, store), worker)
        async with worker.computing(service) as fatal, served as (grpc_address, streams, grpc_health):
            addresses = WorkerAddresses(grpc=grpc_address, http=http_address, streams=streams)
            registrar = announce(worker, service, store=store, health=health, addresses=addresses)
            await _start_accepting(worker, health, grpc_health, registrar)
            describe(worker, addresses)
            _obey(diagnostics, worker, service, health, partial(_publish_readiness, health, grpc_health, registrar))
            if note is not None:
                note.serving()
            with populating(model.kv_cache.memory, worker.kv_use()):
                await _noting_death(worker, store, _unless_fatal(stop.wait(), fatal, health))
            await _stop_accepting(worker, health, grpc_health, registrar)
            await _noting_death(worker, store, _drain(worker, service, fatal, health))


@asynccontextmanager
async def _exit_note(config: WorkerConfig, store: Store, metrics: WorkerMetrics) -> AsyncIterator[ExitNote | None]:
    """Exposes how this worker ended last, and notes how it ends now. Yields None without --worker-id."""
    if not config.worker_id:
        yield None
        return
    note = ExitNote(store, config.worker_id)
    previous = await note.exchange()
    if previous is not None:
        metrics.describe_last_exit(previous.reason, previous.during)
    async with noting_exit(note):
        yield note


async def _load(config: WorkerConfig, stack: AsyncExitStack) -> tuple[LoadedModel, Grammars]:
    """Begins to read the vocabulary, then reads the weights. `Grammars.read_vocabulary` waits for the former."""
    grammars = Grammars(config.model_dir)
    stack.callback(grammars.close)
    model = await asyncio.to_thread(load_model, config)
    stack.callback(model.close)
    return model, grammars


async def _made(make: Callable[[], Worker]) -> Worker:
    """In a thread: kernels that pack blocks may have to be compiled, and health checks are answered meanwhile."""
    with timed(log, "handover_prepared"):
        return await asyncio.to_thread(make)


def _worker_id(config: WorkerConfig, tier: Tier) -> WorkerId:
    return WorkerId(config.worker_id or f"{tier}-{secrets.token_hex(4)}")


async def _start_accepting(worker: Worker, health: Health, grpc_health: GrpcHealth, registrar: Registrar) -> None:
    with timed(log, "vocabulary_read"):
        await worker.grammars.read_vocabulary()
    exempt_all()
    health.not_ready = None
    worker.calls.accept()
    await _publish_readiness(health, grpc_health, registrar)
    stalls = watch_stalls(
        worker.step_loop,
        health,
        timeout_s=worker.config.stall_timeout_s,
        on_change=lambda: _publish_readiness(health, grpc_health, registrar),
        longest_step_s=lambda: worker.steps.longest_step_s,
    )
    worker.tasks.start(stalls, name="stalls")
    if notify.has_listener():
        worker.tasks.start(notify.report_ready(), name="ready")


def _obey(
    diagnostics: DiagnosticsService,
    worker: Worker,
    service: TierService,
    health: Health,
    publish: Callable[[], Awaitable[None]],
) -> None:
    """From now on operators may drain the worker and change its role."""
    diagnostics.rebalance = service.rebalance
    diagnostics.manual_drain = ManualDrain(worker.worker_id, service, worker.calls, health, publish)
    diagnostics.role_change = RoleChange(worker, service, health, publish)


async def _stop_accepting(worker: Worker, health: Health, grpc_health: GrpcHealth, registrar: Registrar) -> None:
    health.not_ready = "draining"
    worker.calls.drain()
    await _publish_readiness(health, grpc_health, registrar)
    notify.stopping()


async def _publish_readiness(health: Health, grpc_health: GrpcHealth, registrar: Registrar) -> None:
    await grpc_health.set_serving(health.is_ready)
    registrar.announce()


@asynccontextmanager
async def _served(
    service: TierService, diagnostics: DiagnosticsService, worker: Worker
) -> AsyncIterator[tuple[str, str, GrpcHealth]]:
    """Yields the addresses for gRPC and for streams, and the switch of gRPC's health service."""

    def register(server: grpc.aio.Server) -> None:
        service.register(server)
        diagnostics_pb2_grpc.add_DiagnosticsServiceServicer_to_server(diagnostics, server)

    names = [service.name, diagnostics.name]
    port = GrpcPort(
        host=worker.config.host,
        port=worker.config.grpc_port,
        flag="--grpc-port",
        credentials=None if worker.tls is None else worker.tls.server_credentials(),
        max_request_bytes=max_call_bytes(worker.model),
    )
    try:
        async with serve_grpc_at(register, names, port) as served:
            address, grpc_health = served
            diagnostics.grpc_address = address
            try:
                yield address, await service.start(address), grpc_health
            finally:
                service.end_idle()
    finally:
        await service.close()


async def _noting_death(worker: Worker, store: Store, work: Coroutine[object, object, None]) -> None:
    """Runs `work`. If the worker fails by itself, routers can read that in Redis before they lose their connections."""

    async def note() -> None:
        await note_death(store, worker.worker_id, worker.epoch, worker.step_loop.requests)

    async with reporting_fatal_signals(note):
        try:
            await work
        except Exception:
            # Rank 0 sees the end of another rank as an error of its own, or is notified of it, whichever comes first.
            ranks = worker.model.rank_group
            if ranks is None or not await asyncio.to_thread(ranks.was_ended):
                await note()
            raise


async def _unless_fatal(
    work: Coroutine[object, object, object], fatal: asyncio.Future[BaseException], health: Health
) -> None:
    """Returns when `work` has ended. Raises the error that ended the step loop if that comes first."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        await asyncio.wait((working, fatal), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
    if fatal.done():
        health.dead = f"the step loop failed: {fatal.result()!r}"
        raise fatal.result()


async def _drain(worker: Worker, service: TierService, fatal: asyncio.Future[BaseException], health: Health) -> None:
    audit.action("drain_started", worker=worker.worker_id, requests=worker.calls.count)
    log.info("draining", active=worker.calls.count, timeout_s=worker.config.drain_timeout_s)
    service.drain(worker.config.drain_timeout_s)
    try:
        async with asyncio.timeout(worker.config.drain_timeout_s):
            await _unless_fatal(worker.calls.wait_idle(), fatal, health)
    except TimeoutError:
        log.warning("drain_timeout", cancelled=worker.calls.count)
        # Routers place these requests elsewhere. Without this error, they would count the worker as lost.
        service.give_up(Draining("The worker is shutting down. Retry on another one."))
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await worker.calls.wait_idle()
    audit.action("drain_ended", worker=worker.worker_id, requests_left=worker.calls.count)
