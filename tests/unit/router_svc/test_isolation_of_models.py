"""What a router keeps of one model says nothing of another: placement, prefixes, losses, refusals and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import Quarantined
from pdserve.base.ids import BlockHash, RequestId, WorkerId
from pdserve.base.sampling import SamplingParams
from pdserve.observe.metrics import GaugeSource
from pdserve.peers.workers import Tier, TransportReport, WorkerRecord
from router_svc.api.models import ModelBackend
from router_svc.generation import Generation, TextRules
from router_svc.records.metrics import RouterMetrics
from router_svc.records.recent_records import RecentRecords
from router_svc.request.gate import Gate
from router_svc.request.quarantine import Quarantine
from router_svc.request.requests import Recorders, Requests
from router_svc.routing.cluster import Cluster, PrefixHashes, RoutingPolicy
from router_svc.routing.placement import Demand, choose_decode
from router_svc.routing.silence import SilenceLimits
from tests.support.records import LAYOUT, worker_record

PROMPT = tuple(range(2 * LAYOUT.block_size))
#: Workers of both models, and what an index with all of their blocks would say.
OF_TINY = worker_record("decode-0")
OF_LARGE = replace(worker_record("decode-1"), model="large", layout=replace(LAYOUT, model="large"))
GENERATION = Generation(
    request_id=RequestId("cmpl-1"),
    worker_request_id=RequestId("cmpl-1"),
    prompt=PROMPT,
    sampling=SamplingParams(seed=1),
    text=TextRules(),
    endpoint="test",
)


def cluster_of(model: str, *workers: WorkerRecord) -> Cluster:
    def workers_of(tier: Tier) -> list[WorkerRecord]:
        return [worker for worker in workers if worker.tier == tier]

    def index(hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        return {worker.worker_id: len(hashes) for worker in workers}

    directory: Any = SimpleNamespace(workers_of=workers_of)
    policy = RoutingPolicy(
        model_name=model,
        local_prefill_threshold=0,
        local_prefill_by_load=False,
        expects_prefill=False,
        reserve_timeout_s=1.0,
        silence=SilenceLimits(silence_timeout_s=1, token_timeout_s=1),
        is_one_of_several=True,
    )
    return Cluster(policy=policy, directory=directory, index=index)


async def test_a_prompt_is_placed_on_workers_of_its_model_only() -> None:
    """The other model's worker is idle, and an index that mixed models would say that it has the whole prompt."""
    busy = replace(OF_TINY, load=replace(OF_TINY.load, queued_tokens=10_000))
    cluster = cluster_of("tiny", busy, OF_LARGE)
    overlap = await cluster.overlap(PrefixHashes(PROMPT, b""))
    assert overlap == {OF_TINY.worker_id: 2}
    demand = Demand(prompt_tokens=len(PROMPT), sequences=1, overlap=overlap)
    placement = choose_decode(cluster.ready("decode"), demand, cluster.in_flight)
    assert placement is not None
    assert placement.worker is busy
    assert cluster.decode_capacity == busy.max_num_seqs


async def test_hashes_of_equal_prompts_for_different_models_differ() -> None:
    hashes = PrefixHashes(PROMPT, b"")
    assert set(await hashes.of(OF_TINY.layout, "")).isdisjoint(await hashes.of(OF_LARGE.layout, ""))


def test_a_slow_path_of_another_models_worker_is_not_this_ones() -> None:
    slow = replace(OF_LARGE, transport=TransportReport(paths={"tcp": 1}, degraded="tcp instead of cma"))
    assert cluster_of("tiny", OF_TINY, slow).slow_path is None
    assert cluster_of("large", OF_TINY, slow).slow_path == "decode-1 tcp instead of cma"


def test_a_refused_request_is_not_refused_for_another_model() -> None:
    """Also where routers of both share a Redis, and equal prompts are equal tokens."""
    tiny, large = Quarantine(b"key", "tiny"), Quarantine(b"key", "large")
    shared: list[bytes] = []
    tiny.on_add = shared.append
    tiny.add(GENERATION, now=0.0)
    large.merge([(shared[0], 600.0)], now=0.0)
    large.check(GENERATION, now=1.0)
    with pytest.raises(Quarantined):
        tiny.check(GENERATION, now=1.0)


def backend_of(name: str, metrics: RouterMetrics) -> ModelBackend:
    cluster, gate = cluster_of(name, OF_TINY, OF_LARGE), Gate(max_waiting=1, max_wait_s=1.0)
    recorders = Recorders(metrics=metrics, recent=RecentRecords(1), store=None, model_name=name)  # type: ignore[arg-type]
    model: Any = SimpleNamespace(name=name)
    requests = Requests(cluster, gate, recorders, tokenizer=None)  # type: ignore[arg-type]
    return ModelBackend(model=model, cluster=cluster, gate=gate, requests=requests, metrics=metrics)


def test_each_model_has_its_series_in_one_registry() -> None:
    tiny = RouterMetrics(model_name="tiny")
    large = tiny.of_model("large")
    large.rejected("queue_full")
    large.set_workers("decode", 3)
    large.inter_token_latency.observe(0.1)
    for metrics, seconds in ((tiny, 1.0), (large, None)):
        metrics.read_gauges(GaugeSource(name="backlog_seconds", text="t", value=lambda seconds=seconds: seconds))  # type: ignore[misc]
    found = {
        (sample.name, sample.labels.get("model_name"), sample.labels.get("reason") or sample.labels.get("tier")): (
            sample.value
        )
        for family in tiny.registry.collect()
        for sample in family.samples
    }
    assert large.registry is tiny.registry
    for name, tier, values in (
        ("pdserve_admission_rejections_total", "queue_full", (0.0, 1.0)),
        ("pdserve_workers_ready", "decode", (0.0, 3.0)),
        ("pdserve_inter_token_latency_seconds_count", "router", (0.0, 1.0)),
        ("pdserve_backlog_seconds", "router", (1.0, None)),
        ("pdserve_start_time_seconds", "router", (found["pdserve_start_time_seconds", "tiny", "router"], None)),
    ):
        assert tuple(found.get((name, model, tier)) for model in ("tiny", "large")) == values
    names = [family.name for family in tiny.registry.collect()]
    assert len(names) == len(set(names))
