"""The router process: its components, its readiness and its shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.net.admin import Health
from pdserve.net.rpc import GrpcHealth, serve_grpc_at
from pdserve.observe.audit import Refusals
from pdserve.observe.metrics import CounterSource, GaugeSource
from pdserve.observe.tracing.setup import span_counters
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from pdserve.redis.clock_skew import ClockSkew
from pdserve.redis.store import Store
from router_svc.api.batches.backend import BatchesBackend
from router_svc.api.batches.batches_api import BatchesApi
from router_svc.api.cancel_api import CancelApi
from router_svc.api.console.console import Console
from router_svc.api.console.state import Sources
from router_svc.api.files.files_api import FilesApi
from router_svc.api.files.stored_files import stored_files
from router_svc.api.front import Addresses, Front
from router_svc.api.grpc_api import SERVICE, Guards, InferenceServicer, Served, public_port
from router_svc.api.intake import Intake
from router_svc.api.ollama.facts import ModelFacts
from router_svc.api.ollama.model_api import OllamaModelApi
from router_svc.api.openai.info import ModelApi, OperatorApi
from router_svc.api.responder import Responder
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.resuming import resuming_of
from router_svc.api.served_model import ServedModel
from router_svc.api.text_threads import TextThreads
from router_svc.api.usage_api import UsageApi
from router_svc.clients.access import access_of
from router_svc.clients.tls import client_tls
from router_svc.cluster_setup import make_cluster, make_models, role_changes
from router_svc.config import RouterConfig
from router_svc.model_state import WatchedModels, export_load
from router_svc.records.metrics import RouterMetrics
from router_svc.records.recent_records import RecentRecords
from router_svc.records.redis_memory import RedisMemory
from router_svc.records.request_store import RequestStore
from router_svc.records.stream_logs import StreamLogs
from router_svc.records.stream_seal import StreamSeal
from router_svc.records.traces import Traces
from router_svc.records.usage_store import UsageStore
from router_svc.rehearsal import rehearsal, rehearse, unrecorded
from router_svc.request.cancels import Cancels
from router_svc.request.limiter import Limiter
from router_svc.request.open_requests import OpenRequests
from router_svc.request.requests import Recorders, Requests
from router_svc.request.shared_quarantine import SharedQuarantine
from router_svc.routing.cluster import TIERS
from router_svc.routing.incarnation import incarnation_of
from router_svc.state.state_store import StateStore
from router_svc.supervisor import NO_DECODE_WORKER, report_alive, report_to_supervisor

log = get_logger(__name__)


class Router:
    """One router, assembled from its components."""

    def __init__(
        self,
        config: RouterConfig,
        models: Sequence[ServedModel],
        store: Store,
        health: Health,
        tracer: Tracer = NO_TRACER,
        state: StateStore | None = None,
    ) -> None:
        self.config = config
        self._tracer, self._refusals = tracer, Refusals()
        self.health = health
        self.metrics = RouterMetrics(model_name=models[0].name)
        self._access, self._tls = access_of(config), client_tls(config)
        self._store = store
        self._mirror = PrefixMirror(store)
        self._request_store = RequestStore(store)
        self._clock_skew, self._redis_memory = ClockSkew(store), RedisMemory(store)
        #: The first model's cluster. Other models share all of it except the policy.
        self.cluster = make_cluster(config, store, self._mirror, self.metrics)
        recent = RecentRecords(config.trace_capacity)
        self._limiter = Limiter(store)
        self._usage = UsageStore(store)
        secret = self.cluster.seals.secret
        self._logs = StreamLogs(store, StreamSeal(secret), ttl_s=config.resume_timeout_s)
        self.models = make_models(config, models, self.cluster, self._recorders(recent))
        self._open = OpenRequests(self.cluster.policy.timeouts)
        self._resuming = resuming_of(self.models, self._logs)
        self._quarantines = [SharedQuarantine(backend.requests.quarantine, store) for backend in self.models]
        self._traces = Traces(recent, self._request_store)
        self._cancels = Cancels(self._open, store, secret)
        # Texts of one model must not delay the bodies of requests for another.
        self._intake = Intake.of(config, models[0].threads if len(models) == 1 else TextThreads())
        self._responder = Responder(self.models, self._open, self._intake, self._resuming, secret)
        self._responses = ResponsesBackend.of(state, self._responder, self._access, self._cancels)
        self._files = stored_files(state, secret, ttl_s=config.state_ttl_s)
        self._batches = BatchesBackend.of(self._files, self._responder, self._access, config)
        self._operator = OperatorApi(self.models, self._traces, health, store)
        self._console = self._make_console() if config.console else None
        self._export_metrics(*self._redis_memory.gauges(), *(() if state is None else state.gauges()))

    def _recorders(self, recent: RecentRecords) -> Recorders:
        return Recorders(
            metrics=self.metrics,
            recent=recent,
            store=self._request_store,
            tracer=self._tracer,
            model_name=self.cluster.policy.model_name,
            limiter=self._limiter,
            usage=self._usage,
            logs=self._logs,
        )

    def _export_metrics(self, *memory: GaugeSource) -> None:
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
        owners = (self._mirror, self._request_store, self._intake, self._usage, self._logs)
        self.metrics.read(*span_counters(self._tracer), *(each for owner in owners for each in owner.counters()))
        self.metrics.read_gauges(*memory)
        for backend in self.models:
            backend.metrics.tenants.known = self._access.tenants
            export_load(backend)

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
                group.start(self._logs.run(), name="stream-logs")
                group.start(self._clock_skew.run(), name="clock-skew")
                group.start(self._redis_memory.run(), name="redis-memory")
                group.start(self._cancels.run(), name="cancels")
                group.start(self.metrics.loop_lag.run(), name="loop-lag")
                group.start(self._follow_cluster(grpc_health), name="cluster")
                self._start_models(group)
                group.start(report_alive(), name="alive")
                self._start_stored(group)
                if self._console is not None:
                    group.start(self._console.run(), name="console")
                yield Addresses(http=http_address, grpc=grpc_address, admin=admin_address)
        finally:
            self._refusals.flush()
            await self.cluster.channels.close()
            self._intake.threads.close()
            for backend in self.models:
                backend.model.close()

    def _start_models(self, group: ServiceGroup) -> None:
        clusters = [backend.cluster for backend in self.models]
        reports = report_to_supervisor(clusters, self._rehearse, lambda: self._is_draining)
        group.start(reports, name="supervisor")
        for cluster in clusters:
            group.start(role_changes(self.config, cluster), name="roles")
        for quarantine in self._quarantines:
            group.start(quarantine.run(), name="quarantine")

    def _start_stored(self, group: ServiceGroup) -> None:
        if self._responses is not None:
            group.start(self._responses.runs.run(), name="responses")
        if self._batches is not None:
            group.start(self._batches.runs.run(), name="batches")

    def _inference(self) -> InferenceServicer:
        guards = Guards(
            access=self._access,
            intake=self._intake,
            refusals=self._refusals,
            cancel=CancelApi(self._cancels, self._traces),
            limit_headers=self._limiter.headers,
        )
        served = Served(self.models, self._open, self._resuming)
        return InferenceServicer(served, guards, self._tracer)

    @property
    def num_open(self) -> int:
        """Client requests whose responses are not complete."""
        return sum(backend.requests.num_open for backend in self.models)

    async def drain(self) -> None:
        """Refuses new requests, and waits for the running ones for at most the drain timeout."""
        self.health.not_ready = "draining"
        for backend in self.models:
            backend.requests.drain()
        if self._batches is not None:
            self._batches.runs.drain()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                for backend in self.models:
                    await backend.requests.wait_idle()
        except TimeoutError:
            log.warning("drain_incomplete", requests=self.num_open, waited_s=self.config.drain_timeout_s)

    def _front(self) -> Front:
        facts = {name: ModelFacts.from_dir(directory) for name, directory in self.config.models.items()}
        return Front(
            config=self.config,
            responder=self._responder,
            responses=self._responses,
            files=FilesApi(self._files, self._intake, max_bytes=self.config.max_file),
            batches=BatchesApi(self._batches, self._cancels, self._intake),
            model=ModelApi(self.models, self._intake),
            ollama=OllamaModelApi(self.models, facts, self._intake),
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
            models=self.models,
            traces=self._traces,
            mirror=self._mirror,
            max_queued=self.config.max_num_queued_reqs,
        )
        return Console(sources, max_readers=self.config.console_clients)

    async def _follow_cluster(self, grpc_health: GrpcHealth) -> None:
        """Updates readiness, capacity and gauges whenever the set of workers changes."""
        directory, watched = self.cluster.directory, WatchedModels(self.models, self.health, self.config)
        while True:
            version = directory.version
            self._update_readiness(is_ready=watched.update())
            await grpc_health.set_serving(self.health.is_ready)
            workers = [worker for tier in TIERS for worker in directory.workers_of(tier)]
            known = {incarnation_of(worker) for worker in workers}
            self.cluster.in_flight.sweep(known)
            await self.cluster.channels.sweep(known)
            for worker in workers:
                await self.cluster.channels.open(worker.worker_id, worker.epoch, worker.grpc_address)
            await directory.wait_for_change(version)

    @property
    def _is_draining(self) -> bool:
        return self.models.first.requests.is_draining

    def _update_readiness(self, *, is_ready: bool) -> None:
        if self._is_draining or is_ready == self.health.is_ready:
            return
        self.health.not_ready = None if is_ready else NO_DECODE_WORKER
        if is_ready:
            log.info("router_ready")
        else:
            log.warning("router_not_ready", reason=NO_DECODE_WORKER)

    async def _rehearse(self) -> None:
        for backend in self.models:
            model, cluster = backend.model, backend.cluster
            requests = Requests(cluster, backend.gate, unrecorded(self._store), model.tokenizer)
            generation = rehearsal(
                local_prefill_threshold=self.config.local_prefill_threshold,
                max_model_len=backend.max_model_len(),
                vocab_size=model.vocab_size,
            )
            await rehearse(requests, generation)
