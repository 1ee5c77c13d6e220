"""Load steps on a real cluster, scraped by a real Prometheus: which tier the shipped autoscalers would enlarge.

The cluster keeps its size. The queries and the behaviour are those of the manifests, and what Kubernetes would make of
the values is computed by `hpa`. Nothing here depends on speed: a step is a kind of load, and the claim is who asks.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment import describe
from tests.deploy.autoscaling.hpa import SYNC_S, Autoscaler
from tests.deploy.autoscaling.load import LoadDriver, Step
from tests.deploy.autoscaling.prometheus import Prometheus, running_prometheus
from tests.deploy.manifests import of_kind
from tests.support.cluster import MODEL, Cluster, running_cluster

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

SCRAPE_INTERVAL_S = 5
#: Sequences that the decode worker runs. Clients beyond them wait at the router.
MAX_NUM_SEQS = 16
CLIENTS = 24
#: Records are averages of a minute: a step lasts longer, and what a step left behind is gone after the rest.
STEP_S, REST_S = 65.0, 75.0

IDLE = Step(name="idle", seconds=STEP_S)
STEADY = Step(name="steady", seconds=STEP_S, prompt_tokens=200, max_tokens=16, interval_s=2.0)
FLOOD = Step(name="prompt flood", seconds=STEP_S, prompt_tokens=1000, max_tokens=4, clients=CLIENTS)
LONG = Step(name="long answers", seconds=STEP_S, prompt_tokens=20, max_tokens=500, clients=CLIENTS)
REST = Step(name="rest", seconds=REST_S)
STEPS = (IDLE, STEADY, FLOOD, REST, LONG, REST, STEADY)

RATES = {
    "measured": 'avg_over_time(pdserve_prefill_tokens_per_second{{tier="prefill"}}[{seconds}s])',
    "counted": 'rate(pdserve_prompt_tokens_total{{tier="prefill"}}[{seconds}s])',
}
PHASES = "sum by (phase) (increase(pdserve_request_phase_seconds_sum[{seconds}s]))"


@dataclass
class Observation:
    """One step: when it was, what the tiers' autoscalers read, the replicas they would have set, and the phases."""

    step: Step
    start: float
    end: float
    values: dict[str, list[float | None]] = field(default_factory=dict)
    replicas: dict[str, list[int]] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    #: Prompt tokens per second of the prefill worker: as it measures them, and as its counter rose.
    prefill_rates: dict[str, float] = field(default_factory=dict)

    def max_replicas(self, tier: str) -> int:
        """The most that the tier's autoscaler asked for during the step."""
        return max(self.replicas[tier])

    def has_changed(self, tier: str) -> bool:
        """Whether the tier's autoscaler asked for another number during the step."""
        return len(set(self.replicas[tier])) > 1


def scaled_objects() -> dict[str, dict[str, Any]]:
    """The specifications of the shipped ScaledObjects by tier, for tiers that begin with one worker as this cluster."""
    return {
        document["metadata"]["labels"]["app.kubernetes.io/component"]: document["spec"] | {"minReplicaCount": 1}
        for document in of_kind("keda", "ScaledObject")
    }


QUERIES = {tier: spec["triggers"][0]["metadata"]["query"] for tier, spec in scaled_objects().items()}


def targets(cluster: Cluster, *tiers: str) -> list[dict[str, Any]]:
    """The processes of these tiers as targets, with the labels that they have in Kubernetes."""
    addresses = {worker.worker_id: (worker.tier, worker.http_address) for worker in cluster.view().workers}
    addresses["router"] = ("router", cluster.base_url.removeprefix("http://"))
    return [
        {"targets": [address], "labels": {"namespace": "pdserve", "pod": name}}
        for name, (tier, address) in addresses.items()
        if tier in tiers
    ]


ALL = ("router", "prefill", "decode")


@dataclass
class Replay:
    """The whole run."""

    cluster: Cluster
    prometheus: Prometheus
    load: LoadDriver
    observations: list[Observation]

    def of(self, step: Step) -> list[Observation]:
        """The runs of a step."""
        return [observation for observation in self.observations if observation.step is step]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    """A cluster after all steps, which is still scraped."""
    directory = tmp_path_factory.mktemp("replay")
    with (
        running_prometheus(directory, scrape_interval_s=SCRAPE_INTERVAL_S) as prometheus,
        running_cluster(directory, "--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-memory", "1GiB") as cluster,
    ):
        prometheus.scrape(targets(cluster, *ALL))
        load = LoadDriver(cluster.base_url, MODEL)
        # The first prompt gives both tiers a rate.
        asyncio.run(load.complete(prompt_tokens=400, max_tokens=8))
        cluster.until(
            lambda: all(prometheus.value(query) is not None for query in QUERIES.values()),
            "every query of the manifests has a value",
            timeout_s=120,
        )
        observations = []
        for step in STEPS:
            start = time.time()
            asyncio.run(load.run(step))
            cluster.wait_idle(timeout_s=120)
            observations.append(Observation(step, start, time.time()))
        cluster.until(lambda: time.time() > observations[-1].end + 2 * SCRAPE_INTERVAL_S, "the last scrape")
        replay = Replay(cluster, prometheus, load, observations)
        _observe(replay)
        _write(replay, directory / "autoscaling-replay.json")
        yield replay


def _observe(replay: Replay) -> None:
    """What autoscalers that ran all the time would have read and done."""
    first, last = replay.observations[0].start, replay.observations[-1].end
    for tier, spec in scaled_objects().items():
        scaler = Autoscaler.from_scaled_object(spec)
        for at, value in replay.prometheus.values(QUERIES[tier], first, last, SYNC_S):
            replicas = scaler.sync(at, value)
            for observation in replay.observations:
                if observation.start <= at < observation.end:
                    observation.values.setdefault(tier, []).append(value)
                    observation.replicas.setdefault(tier, []).append(replicas)
    for observation in replay.observations:
        # Until the scrape after the last request has ended.
        at = observation.end + 2 * SCRAPE_INTERVAL_S
        expression = PHASES.format(seconds=round(at - observation.start))
        found = replay.prometheus.query(expression, at=at)
        observation.phase_seconds = {labels["phase"]: value for labels, value in found}
        for name, rate in RATES.items():
            # Within the step, its beginning and its end left out.
            at, seconds = observation.start + observation.step.seconds, round(observation.step.seconds) - 15
            [(_, observation.prefill_rates[name])] = replay.prometheus.query(rate.format(seconds=seconds), at=at)


def _write(replay: Replay, path: Path) -> None:
    """Everything that was read, for a page of results."""
    found = {
        "environment": describe(),
        "queries": QUERIES,
        "max_num_seqs": MAX_NUM_SEQS,
        "scrape_interval_s": SCRAPE_INTERVAL_S,
        "statuses": replay.load.statuses,
        "steps": [asdict(observation) for observation in replay.observations],
    }
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"autoscaling replay: {path}")


def test_every_query_has_one_value_at_all_times(replay: Replay) -> None:
    for observation in replay.observations:
        for tier in QUERIES:
            assert None not in observation.values[tier], (observation.step.name, tier)


def test_every_request_is_answered(replay: Replay) -> None:
    assert replay.load.statuses.keys() == {200}


@pytest.mark.parametrize("step", [IDLE, STEADY], ids=lambda step: step.name)
def test_no_tier_asks_for_more_while_idle_or_steady(replay: Replay, step: Step) -> None:
    first = replay.of(step)[0]
    assert {tier: set(replicas) for tier, replicas in first.replicas.items()} == {
        tier: {1} for tier in scaled_objects()
    }


def test_no_tier_flaps_at_steady_load(replay: Replay) -> None:
    for observation in replay.of(STEADY):
        rising = {
            tier: [after > before for before, after in pairwise(replicas)]
            for tier, replicas in observation.replicas.items()
        }
        assert not any(any(steps) for steps in rising.values()), observation


def test_under_a_prompt_flood_prefill_asks_for_more_and_decode_does_not(replay: Replay) -> None:
    [flood] = replay.of(FLOOD)
    assert flood.max_replicas("prefill") > 1
    assert flood.max_replicas("decode") == 1
    phases = flood.phase_seconds
    assert phases["prefill"] > max(phases["reserve"], phases["wire"], phases["decode"]), phases


def test_under_long_answers_decode_asks_for_more_and_prefill_does_not(replay: Replay) -> None:
    [long] = replay.of(LONG)
    assert long.max_replicas("decode") > 1
    before = replay.of(REST)[0].replicas["prefill"][-1]
    assert long.max_replicas("prefill") <= before
    assert max(value for value in long.values["prefill"][len(long.values["prefill"]) // 2 :] if value is not None) < 1.5
    phases = long.phase_seconds
    assert phases["decode"] > max(phases["reserve"], phases["prefill"], phases["wire"]), phases


def test_exemplars_lead_to_requests(replay: Replay) -> None:
    end = time.time()
    found = replay.prometheus.exemplars("pdserve_request_phase_seconds_bucket", replay.observations[0].start, end)
    assert found
    request_id = found[-1]["request_id"]
    with urllib.request.urlopen(f"{replay.cluster.base_url}/v1/requests/{request_id}/trace", timeout=10) as response:
        assert json.load(response)["request_id"] == request_id


def test_a_tier_that_is_not_scraped_has_no_value_and_the_others_do(replay: Replay) -> None:
    prometheus, cluster = replay.prometheus, replay.cluster
    try:
        prometheus.scrape(targets(cluster, "router", "decode"))
        cluster.until(
            lambda: prometheus.value(QUERIES["prefill"]) is None, "the prefill tier has no value", timeout_s=90
        )
        assert prometheus.value(QUERIES["decode"]) is not None
        assert prometheus.value(QUERIES["router"]) is not None
    finally:
        prometheus.scrape(targets(cluster, *ALL))
