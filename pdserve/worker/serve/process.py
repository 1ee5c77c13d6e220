"""A worker's life from start to exit, whatever its tier: load, serve, drain."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from kvtransfer.index.kv_events import KvEventPublisher
from kvtransfer.transport import Transport, open_transport
from pdserve import __version__
from pdserve.base import notify
from pdserve.base.admin import Health, bound_socket, serve_admin
from pdserve.base.ids import WorkerId, new_epoch
from pdserve.base.logs import get_logger
from pdserve.base.metrics import CounterSource
from pdserve.base.registry import Registrar, Tier, WorkerLoad, WorkerRecord
from pdserve.base.rpc import GrpcHealth, serve_grpc
from pdserve.base.store import Store
from pdserve.base.tasks import service_group, stop_event_on_signals
from pdserve.engine.pace import Pace
from pdserve.engine.step import Load
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.device import bind_thread
from pdserve.worker.load.populate import populating
from pdserve.worker.serve.loaded_model import load_model
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.worker import TierService, Worker

log = get_logger(__name__)


async def serve_worker(config: WorkerConfig, tier: Tier, build: Callable[[Worker], TierService]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises what killed the step loop: the process must not live on."""
    stop = stop_event_on_signals()
    health = Health()
    metrics = WorkerMetrics(model_name=_model_name(config), tier=tier)
    admin = bound_socket(config.host, config.http_port, flag="--http-port")
    async with serve_admin(health, metrics.registry, admin) as http_address, AsyncExitStack() as stack:
        notify.status("loading the model")
        loaded = await asyncio.to_thread(load_model, config)
        stack.callback(loaded.close)
        async with (
            _opened_transport(config) as transport,
            Store(config.redis_url, on_change=health.watch("redis")) as store,
            service_group() as tasks,
        ):
            # Kernels that pack blocks may have to be compiled: health checks are answered meanwhile.
            worker = await asyncio.to_thread(
                Worker,
                config=config,
                tier=tier,
                worker_id=WorkerId(config.worker_id or f"{tier}-{secrets.token_hex(4)}"),
                epoch=new_epoch(),
                model=loaded,
                transport=transport,
                metrics=metrics,
                tasks=tasks,
            )
            service = build(worker)
            notify.status("warming up")
            async with worker.computing(service) as fatal, _served(service, config) as (addresses, grpc_health):
                registrar = _registered(
                    worker,
                    health,
                    store,
                    service,
                    {**addresses, "http_address": http_address},
                )
                health.not_ready = None
                worker.calls.accept()
                await grpc_health.set_serving(True)
                registrar.announce()
                # What is alive now lives as long as the process. To look through it for garbage would stop all threads
                # for a tenth of a second, whenever the collector thinks it is time.
                gc.collect()
                gc.freeze()
                notify.ready()
                with populating(loaded.kv_cache.memory):
                    await _unless_fatal(stop.wait(), fatal, health)
                health.not_ready = "draining"
                worker.calls.drain()
                await grpc_health.set_serving(False)
                registrar.announce()
                notify.stopping()
                await _drain(worker, fatal, health)


def _model_name(config: WorkerConfig) -> str:
    return config.served_model_name or config.model_dir.name


@asynccontextmanager
async def _opened_transport(config: WorkerConfig) -> AsyncIterator[Transport]:
    bind_thread(config)
    device = config.device if config.handover_memory == "device" else None
    transport = open_transport(config.transport, host=config.host, device=device)
    try:
        # Brought up now: a machine on which it cannot be is told at start, not at the first request.
        await transport.listen()
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def _served(service: TierService, config: WorkerConfig) -> AsyncIterator[tuple[dict[str, str], GrpcHealth]]:
    """Yields the addresses by their names in `WorkerRecord`."""
    try:
        async with serve_grpc(
            service.register, [service.name], host=config.host, port=config.grpc_port, flag="--grpc-port"
        ) as (address, grpc_health):
            yield {"grpc_address": address, "stream_address": await service.start(address)}, grpc_health
    finally:
        await service.close()


def _registered(
    worker: Worker, health: Health, store: Store, service: TierService, addresses: Mapping[str, str]
) -> Registrar:
    """Starts telling the cluster about this worker and its blocks; logs what it is."""
    loaded, config = worker.model, worker.config

    def record() -> WorkerRecord:
        return WorkerRecord(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            tier=worker.tier,
            grpc_address=addresses["grpc_address"],
            http_address=addresses["http_address"],
            stream_address=addresses["stream_address"],
            model=_model_name(config),
            layout=loaded.layout,
            max_num_seqs=service.max_num_seqs,
            max_model_len=loaded.limits.max_model_len,
            total_blocks=loaded.pool.num_blocks,
            pid=os.getpid(),
            ready=health.is_ready,
            load=reported_load(worker.load, worker.steps.pace, service.itl_budget_s),
        )

    registrar = Registrar(store, record)
    publisher = KvEventPublisher(store, worker.worker_id, worker.epoch)
    worker.steps.on_cache_events = publisher.publish
    worker.steps.on_queue_empty = registrar.announce_empty_queue
    threads = loaded.decoder.thread_counters
    worker.metrics.read(
        CounterSource(name="registry_failures", text="Heartbeats lost", value=lambda: registrar.failures),
        CounterSource(
            name="kv_event_failures",
            text="Batches of KV events that Redis did not take",
            value=lambda: publisher.failures,
        ),
        CounterSource(
            name="kv_event_resyncs", text="Times the prefix index was written anew", value=lambda: publisher.resyncs
        ),
        CounterSource(name="redis_outages", text="Connections to Redis that failed", value=lambda: store.outages),
        CounterSource(
            name="borrowed_core_seconds",
            text="Seconds that idle cores of other workers computed for this one, summed over cores",
            value=lambda: 0.0 if threads is None else threads.borrowed_core_seconds,
        ),
        CounterSource(
            name="redone_units",
            text="Parts of forward passes computed again because a thread that had begun them lost its core",
            value=lambda: 0 if threads is None else threads.redone_units,
        ),
    )
    worker.tasks.start(registrar.run(), name="registrar")
    worker.tasks.start(publisher.run(), name="kv-events")
    labels = {
        "worker_id": worker.worker_id,
        "epoch": str(worker.epoch),
        "transport": config.transport,
        "device": config.device,
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "dtype": loaded.layout.dtype,
        "block_size": str(loaded.layout.block_size),
        "version": __version__,
    }
    worker.metrics.worker_info.labels(**worker.metrics.labels(**labels)).set(1)
    chosen = {
        "kernels": loaded.kernels.backend,
        "instruction_set": loaded.kernels.instruction_set,
        "quantization": loaded.kernels.quantization,
        "mode": loaded.kernels.mode,
    }
    reason = loaded.kernels.reason
    worker.metrics.kernels_info.labels(**worker.metrics.labels(**chosen, reason=reason)).set(1)
    if reason:
        log.warning("slow_kernels", kernels=loaded.kernels.backend, reason=reason)
    log.info(
        "worker_ready",
        grpc=addresses["grpc_address"],
        http=addresses["http_address"],
        streams=addresses["stream_address"] or None,
        blocks=loaded.pool.num_blocks,
        max_model_len=loaded.limits.max_model_len,
        borrow_cpus=",".join(map(str, loaded.kernels.borrow_cpus)),
        **labels,
        **chosen,
    )
    return registrar


def reported_load(load: Load, pace: Pace | None, itl_budget_s: float | None) -> WorkerLoad:
    """What routers hear of the load, with rates in whole tokens: no news is made of their noise."""
    alone = beside = None
    if pace is not None:
        alone = float(round(pace.prefill_tokens_per_s()))
        beside = None if itl_budget_s is None else float(round(pace.prefill_tokens_per_s(itl_budget_s)))
    return WorkerLoad(
        running=load.num_running,
        waiting=load.num_waiting,
        queued_tokens=load.queued_prompt_tokens,
        queued_by_router=load.queued_by_router,
        free_blocks=load.free_blocks,
        prefill_tokens_per_s=alone,
        prefill_tokens_per_s_beside_decoding=beside,
    )


async def _unless_fatal(
    work: Coroutine[object, object, object], fatal: asyncio.Future[BaseException], health: Health
) -> None:
    """Returns when `work` has ended. Raises what has killed the step loop before."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        await asyncio.wait((working, fatal), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
    if fatal.done():
        health.dead = f"the step loop failed: {fatal.result()!r}"
        raise fatal.result()


async def _drain(worker: Worker, fatal: asyncio.Future[BaseException], health: Health) -> None:
    log.info("draining", active=worker.calls.count, timeout_s=worker.config.drain_timeout_s)
    try:
        async with asyncio.timeout(worker.config.drain_timeout_s):
            await _unless_fatal(worker.calls.wait_idle(), fatal, health)
    except TimeoutError:
        log.warning("drain_timeout", cancelled=worker.calls.count)
