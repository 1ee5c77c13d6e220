"""The router process: its components, its readiness and its shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.base import audit, notify
from pdserve.base.admin import Health
from pdserve.base.audit import Refusals
from pdserve.base.clock_skew import ClockSkew
from pdserve.base.collector import exempt_all
from pdserve.base.logs import get_logger
from pdserve.base.metrics import CounterSource, GaugeSource
from pdserve.base.rpc import GrpcHealth, serve_grpc_at
from pdserve.base.store import Store
from pdserve.base.tasks import service_group, stop_event_on_signals
from pdserve.base.tracing.setup import span_counters, tracing
from pdserve.base.tracing.spans import NO_TRACER, Tracer
from router_svc.api.cancel_api import CancelApi
from router_svc.api.console.console import Console
from router_svc.api.console.state import Sources
from router_svc.api.front import Addresses, Front
from router_svc.api.grpc_api import SERVICE, Guards, InferenceServicer, Served, public_port
from router_svc.api.intake import Intake
from router_svc.api.openai.generation_api import GenerationApi
from router_svc.api.openai.info import ModelApi, OperatorApi
from router_svc.api.openai.resume_api import ResumeApi
from router_svc.api.resuming import resuming_of
from router_svc.api.served_model import ServedModel
from router_svc.api.usage_api import UsageApi
from router_svc.clients.access import access_of
from router_svc.clients.tls import client_tls
from router_svc.cluster_setup import make_cluster, role_changes
from router_svc.config import RouterConfig
from router_svc.records.metrics import RouterMetrics
from router_svc.records.recent_records import RecentRecords
from router_svc.records.redis_memory import RedisMemory
from router_svc.records.request_store import RequestStore
from router_svc.records.traces import Traces
from router_svc.records.usage_store import UsageStore
from router_svc.rehearsal import rehearsal, rehearse, unrecorded
from router_svc.request.cancels import Cancels
from router_svc.request.gate import Gate
from router_svc.request.limiter import Limiter
from router_svc.request.requests import Recorders, Requests
from router_svc.request.shared_quarantine import SharedQuarantine
from router_svc.routing.backlog import prefill_backlog_s
from router_svc.routing.cluster import TIERS
from router_svc.routing.incarnation import incarnation_of
from router_svc.supervisor import NO_DECODE_WORKER, report_alive, report_to_supervisor

log = get_logger(__name__)

UNPAIRED = "no prefill worker has the KV layout of {}; they prefill by themselves"
NO_PREFILL_WORKER = "no prefill worker is ready; decode workers prefill"


class Router:
    """One router, assembled from its components."""

    def __init__(
        self, config: RouterConfig, model: ServedModel, store: Store, health: Health, tracer: Tracer = NO_TRACER
    ) -> None:
        self.config = config
        self._tracer, self._refusals = tracer, Refusals()
        self.health = health
        self.metrics = RouterMetrics(model_name=config.model_name)
        self._access = access_of(config)
        self._tls = client_tls(config)
        self._store = store
        self._mirror = PrefixMirror(store)
        self._request_store = RequestStore(store)
        self._clock_skew = ClockSkew(store)
        self._redis_memory = RedisMemory(store)
        self.cluster = make_cluster(config, store, self._mirror, self.metrics)
        self._gate = Gate(max_waiting=config.max_num_queued_reqs, max_wait_s=config.queue_timeout_s)
        recent = RecentRecords(config.trace_capacity)
        self._limiter = Limiter(store)
        self._usage = UsageStore(store)
        self._resuming = resuming_of(self.cluster, store, ttl_s=config.resume_timeout_s)
        self.metrics.tenants.known = self._access.tenants
        ranked, recorders = config.scheduling_policy == "priority", self._recorders(recent)
        self._requests = Requests(self.cluster, self._gate, recorders, model.tokenizer, by_priority=ranked)
        self._shared_quarantine = SharedQuarantine(self._requests.quarantine, store)
        self._traces = Traces(recent, self._request_store)
        self._cancels = Cancels(self._requests.open, store, self.cluster.seals.secret)
        self._model = model
        self._intake = Intake(model.threads)
        self._operator = OperatorApi(self.cluster, self._traces, self._gate, health, store)
        self._console = self._make_console() if config.console else None
        self._export_metrics()

    def _recorders(self, recent: RecentRecords) -> Recorders:
        return Recorders(
            metrics=self.metrics,
            recent=recent,
            store=self._request_store,
            tracer=self._tracer,
            model_name=self.config.model_name,
            limiter=self._limiter,
            usage=self._usage,
            logs=self._resuming.logs,
        )

    def _export_metrics(self) -> None:
        """Exports the numbers that other objects keep."""
        self.metrics.watch_degraded(self.health.degraded)
        self.metrics.watch_ready(self.health)
        self.metrics.clock_skew.set_function(lambda: self._clock_skew.seconds)
        self.metrics.read(
            CounterSource(
                name="registry_failures",
                text="Failed reads of the worker registry",
                value=lambda: self.cluster.directory.failures,
            ),
        )
        owners = (self._mirror, self._request_store, self._intake, self._usage, self._resuming.logs)
        self.metrics.read(*span_counters(self._tracer), *(each for owner in owners for each in owner.counters()))
        self.metrics.num_requests_running.set_function(lambda: self._gate.num_admitted)
        self.metrics.num_requests_waiting.set_function(lambda: self._gate.num_waiting)
        self.metrics.queued_uncached_tokens.set_function(lambda: self._gate.uncached_tokens)
        self.metrics.read_gauges(
            *self._redis_memory.gauges(),
            GaugeSource(
                name="prefill_backlog_seconds",
                text="Time that one worker of the prefill tier would need for the prompts in the admission queue",
                value=lambda: prefill_backlog_s(
                    self._gate.uncached_tokens, self.cluster.ready("prefill") or self.cluster.ready("decode")
                ),
            ),
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Addresses]:
        """Serves until the block ends. The router is ready while a decode worker is."""
        port = public_port(self.config, None if self._tls is None else self._tls.credentials)
        try:
            async with (
                service_group() as group,
                self._front().serving() as (http_address, admin_address),
                serve_grpc_at(self._inference().register, [SERVICE], port) as (grpc_address, grpc_health),
            ):
                if self.cluster.tls is not None:
                    group.start(self.cluster.tls.run(), name="peer-certificates")
                    group.start(self.cluster.streams.run(), name="spare-streams")
                if self._tls is not None:
                    group.start(self._tls.run(), name="certificates")
                group.start(self._access.run(), name="api-keys")
                group.start(self.cluster.directory.run(), name="directory")
                group.start(self._mirror.run(), name="prefix-mirror")
                group.start(self._request_store.run(), name="request-store")
                group.start(self._limiter.run(), name="limits")
                group.start(self._usage.run(), name="usage")
                group.start(self._resuming.logs.run(), name="stream-logs")
                group.start(self._clock_skew.run(), name="clock-skew")
                group.start(self._redis_memory.run(), name="redis-memory")
                group.start(self._shared_quarantine.run(), name="quarantine")
                group.start(self._cancels.run(), name="cancels")
                group.start(self.metrics.loop_lag.run(), name="loop-lag")
                group.start(self._follow_cluster(grpc_health), name="cluster")
                reports = report_to_supervisor(self.cluster, self._rehearse, lambda: self._requests.is_draining)
                group.start(reports, name="supervisor")
                group.start(role_changes(self.config, self.cluster), name="roles")
                group.start(report_alive(), name="alive")
                if self._console is not None:
                    group.start(self._console.run(), name="console")
                yield Addresses(http=http_address, grpc=grpc_address, admin=admin_address)
        finally:
            self._refusals.flush()
            await self.cluster.channels.close()
            self._model.close()

    def _inference(self) -> InferenceServicer:
        guards = Guards(
            access=self._access,
            intake=self._intake,
            refusals=self._refusals,
            cancel=CancelApi(self._cancels, self._traces),
            limit_headers=self._limiter.headers,
        )
        served = Served(self._model, self._requests, self._max_model_len, self._resuming)
        return InferenceServicer(served, guards, self._tracer)

    @property
    def num_open(self) -> int:
        """Client requests whose responses are not complete."""
        return self._requests.num_open

    async def drain(self) -> None:
        """Refuses new requests, and waits for the running ones for at most the drain timeout."""
        self.health.not_ready = "draining"
        self._requests.drain()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._requests.wait_idle()
        except TimeoutError:
            log.warning("drain_incomplete", requests=self._requests.num_open, waited_s=self.config.drain_timeout_s)

    def _front(self) -> Front:
        return Front(
            config=self.config,
            generation=GenerationApi(self._model, self._requests, self._max_model_len, self._intake, self._resuming),
            resume=ResumeApi(self._model, self._requests, self._resuming),
            model=ModelApi(self._model, self._max_model_len, self._intake),
            operator=self._operator,
            cancel=CancelApi(self._cancels, self._traces),
            usage=UsageApi(self._usage),
            console=self._console,
            health=self.health,
            registry=self.metrics.registry,
            access=self._access,
            limit_headers=self._limiter.headers,
            tls=self._tls,
            refusals=self._refusals,
            tracer=self._tracer,
        )

    def _make_console(self) -> Console:
        sources = Sources(
            operator=self._operator,
            cluster=self.cluster,
            traces=self._traces,
            mirror=self._mirror,
            max_queued=self.config.max_num_queued_reqs,
        )
        return Console(sources, max_readers=self.config.console_clients)

    def _max_model_len(self) -> int:
        return self.cluster.max_model_len(default=self._model.max_position_embeddings)

    async def _follow_cluster(self, grpc_health: GrpcHealth) -> None:
        """Updates readiness, capacity and gauges whenever the set of workers changes."""
        while True:
            version = self.cluster.directory.version
            ready = {tier: len(self.cluster.ready(tier)) for tier in TIERS}
            self._gate.set_capacity(self.cluster.decode_capacity)
            self._update_readiness(is_ready=ready["decode"] > 0)
            await grpc_health.set_serving(self.health.is_ready)
            missing_prefill = self.config.prefill_expected > 0 and not ready["prefill"]
            self.health.watch("prefill")(NO_PREFILL_WORKER if missing_prefill else None)
            unpaired = self.cluster.unpaired_decode
            self.health.watch("layout")(UNPAIRED.format(", ".join(unpaired)) if unpaired else None)
            self.health.watch("transport")(self.cluster.slow_path)
            for tier, count in ready.items():
                self.metrics.set_workers(tier, count)
            workers = [worker for tier in TIERS for worker in self.cluster.directory.workers_of(tier)]
            known = {incarnation_of(worker) for worker in workers}
            self.cluster.in_flight.sweep(known)
            await self.cluster.channels.sweep(known)
            for worker in workers:
                await self.cluster.channels.open(worker.worker_id, worker.epoch, worker.grpc_address)
            await self.cluster.directory.wait_for_change(version)

    def _update_readiness(self, *, is_ready: bool) -> None:
        if self._requests.is_draining or is_ready == self.health.is_ready:
            return
        self.health.not_ready = None if is_ready else NO_DECODE_WORKER
        if is_ready:
            log.info("router_ready")
        else:
            log.warning("router_not_ready", reason=NO_DECODE_WORKER)

    async def _rehearse(self) -> None:
        requests = Requests(self.cluster, self._gate, unrecorded(self._store), self._model.tokenizer)
        generation = rehearsal(
            local_prefill_threshold=self.config.local_prefill_threshold,
            max_model_len=self._max_model_len(),
            vocab_size=self._model.vocab_size,
        )
        await rehearse(requests, generation)


async def serve(config: RouterConfig) -> None:
    """Runs the router until SIGTERM or SIGINT. Raises `SetupError`."""
    stop = stop_event_on_signals(audit.stop_requested)
    health = Health(not_ready=NO_DECODE_WORKER)
    async with (
        tracing(config, "pdserve-router") as tracer,
        Store(config.redis_url, prefix=config.redis_prefix, on_change=health.watch("redis")) as store,
    ):
        model = ServedModel.load(
            config.model_dir, config.model_name, special_tokens_in_text=config.special_tokens_in_text
        )
        router = Router(config, model, store, health, tracer)
        exempt_all()
        async with router.serving() as addresses:
            more: dict[str, str | None] = {} if addresses.admin is None else {"admin": addresses.admin}
            more["revision"] = router.cluster.policy.model_revision
            log.info("router_listening", http=addresses.http, grpc=addresses.grpc, model=config.model_name, **more)
            notify.status(NO_DECODE_WORKER)
            await stop.wait()
            audit.action("drain_started", requests=router.num_open)
            log.info("router_draining")
            notify.stopping()
            await router.drain()
            audit.action("drain_ended", requests_left=router.num_open)
