"""Announcing a worker: its record in the registry, its blocks in the prefix index, its metrics and its log line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.index.kv_events import KvEventPublisher
from pdserve import __version__
from pdserve.base.logs import get_logger
from pdserve.base.sampling import SAMPLING_VERSION
from pdserve.base.timing import process_age_s
from pdserve.engine.pace import Pace
from pdserve.engine.step import Load
from pdserve.model.revision import revision_of
from pdserve.net.admin import Health
from pdserve.observe.metrics import CounterSource
from pdserve.peers.registry import Registrar, WorkerLoad, WorkerRecord
from pdserve.redis.clock_skew import ClockSkew
from pdserve.redis.store import Store
from pdserve.worker.serve.worker import KEEP_ALIVE_S, TierService, Worker

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddresses:
    """The addresses that a worker listens on, each as `host:port`."""

    grpc: str
    http: str
    #: Empty for a tier that takes requests over gRPC.
    streams: str


def announce(
    worker: Worker, service: TierService, *, store: Store, health: Health, addresses: WorkerAddresses
) -> Registrar:
    """Starts heartbeats and KV events, and exposes what they and the kernels count."""
    registrar = Registrar(store, lambda: worker_record(worker, service, addresses, ready=health.is_ready))
    registrar.secret = worker.seals.secret
    publisher = KvEventPublisher(store, worker.worker_id, worker.epoch)
    worker.steps.on_cache_events = publisher.publish
    worker.steps.on_queue_empty = registrar.announce_empty_queue
    _count(worker, store, registrar, publisher)
    skew = ClockSkew(store)
    worker.metrics.clock_skew.set_function(lambda: skew.seconds)
    worker.tasks.start(skew.run(), name="clock-skew")
    if worker.tls is not None:
        worker.tasks.start(worker.tls.run(), name="peer-certificates")
    worker.tasks.start(registrar.run(), name="registrar")
    worker.tasks.start(publisher.run(), name="kv-events")
    worker.paths.on_change = health.watch("transport")
    worker.tasks.start(worker.paths.run(), name="transport-paths")
    return registrar


def worker_record(worker: Worker, service: TierService, addresses: WorkerAddresses, *, ready: bool) -> WorkerRecord:
    """The worker's entry in the registry, as of now."""
    model, config = worker.model, worker.config
    return WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        tier=worker.tier,
        grpc_address=addresses.grpc,
        http_address=addresses.http,
        stream_address=addresses.streams if worker.tier == "decode" else "",
        home_tier=worker.home_tier,
        model=config.model_name,
        layout=model.layout,
        max_num_seqs=service.max_num_seqs,
        max_model_len=model.limits.max_model_len,
        total_blocks=model.pool.num_blocks,
        pid=os.getpid(),
        ready=ready,
        keep_alive_s=KEEP_ALIVE_S,
        numerics_class=worker.numerics_class,
        reads_grammars=worker.grammars.are_available,
        asks_for_addresses=True,
        sampling_version=SAMPLING_VERSION,
        transport=worker.paths.report(),
        load=reported_load(worker.load, worker.steps.pace, service.itl_budget_s),
    )


def reported_load(load: Load, pace: Pace | None, itl_budget_s: float | None) -> WorkerLoad:
    """The load as routers see it. Rates are rounded to whole tokens per second, so that noise is not a change."""
    alone = while_decoding = None
    if pace is not None:
        alone = float(round(pace.prefill_tokens_per_s()))
        while_decoding = None if itl_budget_s is None else float(round(pace.prefill_tokens_per_s(itl_budget_s)))
    return WorkerLoad(
        running=load.num_running,
        waiting=load.num_waiting,
        queued_tokens=load.queued_prompt_tokens,
        queued_by_router=load.queued_by_router,
        free_blocks=load.free_blocks,
        prefill_tokens_per_s=alone,
        prefill_tokens_per_s_while_decoding=while_decoding,
    )


def _count(worker: Worker, store: Store, registrar: Registrar, publisher: KvEventPublisher) -> None:
    threads = worker.model.decoder.thread_counters
    worker.metrics.read(
        CounterSource(name="registry_failures", text="Heartbeats lost", value=lambda: registrar.failures),
        CounterSource(
            name="kv_event_failures",
            text="Batches of KV events that Redis did not accept",
            value=lambda: publisher.failures,
        ),
        CounterSource(
            name="kv_event_resyncs",
            text="Times this worker rewrote its entries in the prefix index",
            value=lambda: publisher.resyncs,
        ),
        CounterSource(name="redis_outages", text="Connections to Redis that failed", value=lambda: store.outages),
        CounterSource(
            name="borrowed_core_seconds",
            text="Seconds that idle cores of other workers computed for this one, summed over cores",
            value=lambda: 0.0 if threads is None else threads.borrowed_core_seconds,
        ),
        CounterSource(
            name="redone_units",
            text="Work units of forward passes computed again because the thread that had started them lost its core",
            value=lambda: 0 if threads is None else threads.redone_units,
        ),
    )


def describe(worker: Worker, addresses: WorkerAddresses) -> None:
    """Sets the worker's info metrics and logs that it is ready, with everything that distinguishes it."""
    config, model, kernels = worker.config, worker.model, worker.model.kernels
    identity = {
        "worker_id": worker.worker_id,
        "epoch": str(worker.epoch),
        "transport": config.transport,
        "device": config.device,
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "dtype": model.layout.dtype,
        "block_size": str(model.layout.block_size),
        "version": __version__,
        "numerics_class": worker.numerics_class,
    }
    chosen = {
        "kernels": kernels.backend,
        "instruction_set": kernels.instruction_set,
        "quantization": kernels.quantization,
        "mode": kernels.mode,
    }
    worker.metrics.describe(identity, {**chosen, "reason": kernels.reason})
    if kernels.reason:
        log.warning("slow_kernels", kernels=kernels.backend, reason=kernels.reason)
    log.info(
        "worker_ready",
        grpc=addresses.grpc,
        http=addresses.http,
        streams=addresses.streams or None,
        blocks=model.pool.num_blocks,
        max_model_len=model.limits.max_model_len,
        revision=revision_of(Path(config.model)),
        borrow_cpus=",".join(map(str, kernels.borrow_cpus)),
        tall_tiles=kernels.tall_tiles or None,
        gated_products=kernels.gated_products or None,
        process_age_s=round(process_age_s(), 2),
        **identity,
        **chosen,
    )
