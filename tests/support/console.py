"""A console over a cluster of records alone: workers and requests are what a test says, and nothing runs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from kvtransfer.index.prefix_index import KvEvent, KvEventKind, PrefixIndex
from pdserve.base.errors import PdserveError
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.base.tasks import service_group
from pdserve.net.admin import Health, bound_socket, serve_http
from pdserve.peers.workers import Tier, WorkerLoad, WorkerRecord
from router_svc.api.console.events import ConsoleEvents
from router_svc.api.console.feed import Feed
from router_svc.api.console.load import LoadHistory
from router_svc.api.console.page import console_page
from router_svc.api.console.state import ClusterState, Sources
from router_svc.api.http_app import HttpRules, make_app
from router_svc.api.models import ModelBackend, Models
from router_svc.api.openai.info import OperatorApi
from router_svc.clients.access import Access
from router_svc.records.events import (
    Admitted,
    BlocksReserved,
    DecodeStarted,
    Ended,
    Event,
    FirstDecoded,
    FirstToken,
    FirstWrite,
    Prefilled,
    PrefillProgressed,
    WorkerChosen,
)
from router_svc.records.recent_records import RecentRecords
from router_svc.records.record import Record
from router_svc.records.request_state import RequestProgress, RequestState
from router_svc.records.traces import Traces
from router_svc.routing.cluster import Cluster, RoutingPolicy
from router_svc.routing.silence import SilenceLimits
from tests.support.records import block_hashes, worker_record

MODEL = "tiny"
MAX_QUEUED = 512


@dataclass
class FakeGate:
    """Numbers of prompts, as the admission gate counts them."""

    num_admitted: int = 0
    num_waiting: int = 0


@dataclass
class FakeDirectory:
    """The registry's workers."""

    workers: list[WorkerRecord] = field(default_factory=list)

    def workers_of(self, tier: Tier) -> list[WorkerRecord]:
        return [worker for worker in self.workers if worker.tier == tier]


@dataclass
class FakeStore:
    """Redis, as far as states show it; no older request is found in it."""

    available: bool = True

    async def get(self, _: RequestId) -> None:
        return None


class FakeCluster:
    """Everything that the console shows, to be changed by a test."""

    def __init__(
        self, workers: Sequence[WorkerRecord] = (), *, expects_prefill: bool = True, capacity: int = 1000
    ) -> None:
        self.directory = FakeDirectory(list(workers))
        self.gate = FakeGate()
        self.health = Health(not_ready=None)
        self.store = FakeStore()
        self.recent = RecentRecords(capacity)
        self.mirror = SimpleNamespace(index=PrefixIndex(), degraded=False)
        policy = RoutingPolicy(
            model_name=MODEL,
            local_prefill_threshold=64,
            local_prefill_by_load=True,
            expects_prefill=expects_prefill,
            reserve_timeout_s=600,
            silence=SilenceLimits(silence_timeout_s=10, token_timeout_s=300),
        )
        fakes: Any = self
        self.none = None
        self.cluster = Cluster(policy=policy, directory=fakes.directory, index=fakes.mirror.index.overlap)
        self.traces = Traces(self.recent, fakes.store)
        model: Any = SimpleNamespace(name=MODEL)
        backend = ModelBackend(
            model=model, cluster=self.cluster, gate=fakes.gate, requests=fakes.none, metrics=fakes.none
        )
        self.models = Models([backend])
        self.operator = OperatorApi(self.models, self.traces, self.health, fakes.store)

    @property
    def sources(self) -> Sources:
        """What the console reads."""
        mirror: Any = self.mirror
        return Sources(
            operator=self.operator, models=self.models, traces=self.traces, mirror=mirror, max_queued=MAX_QUEUED
        )

    def state(self) -> ClusterState:
        """The state with an empty history."""
        return ClusterState(self.sources, history=LoadHistory(120))

    def set_load(self, index: int, load: WorkerLoad, *, ready: bool = True) -> None:
        """Changes what one worker reports."""
        self.directory.workers[index] = replace(self.directory.workers[index], load=load, ready=ready)

    def cache(self, worker_id: str, blocks: int) -> None:
        """Lets a worker hold this many blocks of the prefix index."""
        event = KvEvent(
            worker_id=WorkerId(worker_id), epoch=Epoch(1), kind=KvEventKind.RESET, added=tuple(block_hashes(blocks))
        )
        self.mirror.index.apply(event)

    def add_request(self, request_id: str, **changes: Any) -> Record:
        """A finished request, unless changes say otherwise."""
        record = request_record(request_id, **changes)
        self.recent.add(record)
        return record


_DECODE, _PREFILL = WorkerId("decode-0"), WorkerId("prefill-0")
#: The events of a request that was handed over, with their times in seconds.
_EVENTS: Sequence[tuple[float, Event]] = (
    (0.0004, Admitted()),
    (0.0042, BlocksReserved(worker=_DECODE, reserve_s=0.003)),
    (0.0042, WorkerChosen(worker=_PREFILL, epoch=Epoch(1), tier="prefill", why="the only candidate")),
    (0.011, PrefillProgressed(computing_s=0.0, cached_tokens=0, computed_tokens=0)),
    (0.18, Prefilled(cached_tokens=0, is_complete=False)),
    (0.18, FirstToken()),
    (0.181, FirstWrite()),
    (
        0.19,
        DecodeStarted(worker=_DECODE, queue_s=0.0, is_prefilled_locally=False, cached_tokens=0, computing_s=0.0),
    ),
    (0.2, FirstDecoded()),
)
_END_S = 0.71


def request_record(
    request_id: str,
    *,
    state: RequestState = RequestState.FINISHED,
    ago_s: float = 10.0,
    chosen: Iterable[WorkerChosen] = (),
    error: str = "",
    **changes: Any,
) -> Record:
    """A record in this state, accepted `ago_s` seconds ago. `chosen`: decisions before all others."""
    at = time.time() - ago_s
    record = Record(
        request_id=RequestId(request_id),
        prompt_tokens=300,
        max_tokens=64,
        n=1,
        accepted_at=at,
        clock=time.monotonic,
        accepted_clock=time.monotonic() - ago_s,
        progress=RequestProgress.new(RequestId(request_id), at=at),
        **{"endpoint": "/v1/chat/completions"} | changes,
    )
    is_served = state in (RequestState.DECODING, RequestState.FINISHED)
    if state is not RequestState.QUEUED:
        for happened_at, event in _EVENTS if is_served else _EVENTS[:1]:
            record.append(event, at=happened_at)
            if isinstance(event, Admitted):
                for each in chosen:
                    record.append(each, at=happened_at)
    if state is RequestState.FINISHED:
        record.completion_tokens = 64
        record.append(Ended.finished(["length"]), at=_END_S)
    elif state is RequestState.FAILED:
        record.append(Ended.failed(PdserveError(error)), at=_END_S)
    else:
        assert state in (RequestState.QUEUED, RequestState.DECODING)
    return record


def many_workers(prefill: int, decode: int) -> list[WorkerRecord]:
    """Ready workers with different loads."""
    tiers: list[tuple[Tier, int]] = [("prefill", prefill), ("decode", decode)]
    return [
        replace(
            worker_record(f"{tier}-{index}", tier=tier),
            load=WorkerLoad(
                running=index % 9,
                waiting=max(0, index % 13 - 10),
                queued_tokens=97 * (index % 11) if tier == "prefill" else 0,
                free_blocks=100 - (37 * index) % 101,
                prefill_tokens_per_s=2400.0 + index,
            ),
        )
        for tier, count in tiers
        for index in range(count)
    ]


@asynccontextmanager
async def serving(fake: FakeCluster, **options: Any) -> AsyncIterator[tuple[str, Feed]]:
    """The console of a cluster, with its operator's endpoints; yields the base URL and the feed.

    Options are those of `Feed`, `write_timeout_s` and `max_age_s` of the stream, further `routes`, and the `access`
    of a router with keys.
    """
    routes = options.pop("routes", [])
    access = options.pop("access", Access())
    limits = {name: options.pop(name) for name in ("write_timeout_s", "max_age_s") if name in options}
    feed = Feed(fake.state(), **({"max_readers": 4, "interval_s": 0.05} | options))
    groups = [fake.operator.routes(), ConsoleEvents(feed, **limits).routes(), console_page().routes(), routes]
    app = make_app(groups, HttpRules(max_body_bytes=1024, access=access))
    app.on_shutdown.append(lambda _: _close(feed))
    listener = bound_socket("127.0.0.1", 0, flag="--port")
    try:
        async with service_group() as group, serve_http(app, listener) as address:
            group.start(feed.run(), name="feed")
            yield f"http://{address}", feed
    finally:
        listener.close()


async def _close(feed: Feed) -> None:
    feed.close()


__all__ = ["FakeCluster", "many_workers", "request_record", "serving"]
