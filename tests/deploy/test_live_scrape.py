"""A real Prometheus scrapes a real cluster: rules evaluate, healthy is silent, panels have data, faults are seen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.deploy.catalog import RULES, alerts, all_rules, recorded, selectors
from tests.deploy.dashboards.generate import DASHBOARDS
from tests.deploy.dashboards.panels import Dashboard, Panel, Query
from tests.support.cluster import MODEL, Cluster, running_cluster
from tests.support.lazily import openai
from tests.support.prometheus import Prometheus, running_prometheus

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600), pytest.mark.xdist_group("live_scrape")]

#: At most this many uncached tokens are prefilled by the decode worker.
_LOCAL_TOKENS = 64
_SCRAPED_S = 60.0
#: Panels that stay empty until a fault, and the fault that fills them.
FILLED_BY_A_FAULT = {
    "Last exit": "a worker that was killed and restarted",
    "Pause behind a failure": "a worker that was lost under a stream",
    "Pause of a move": "a worker that drains or is full",
}
#: Alerts on speed and memory, which a busy machine decides.
DEPENDS_ON_THE_MACHINE = {
    "PdserveFirstTokensSlow",
    "PdserveTokensSlow",
    "PdserveStreamsStall",
    "PdserveRouterLoopHeld",
    "PdservePrefillBacklog",
    "PdserveMemoryLow",
}
#: Metrics of Prometheus' own, of kube-state-metrics, and of what exists after a fault alone.
_ELSEWHERE = ("up", "ALERTS", "kube_")


@dataclass(frozen=True, slots=True)
class Watched:
    """A cluster that has served requests of several kinds, and the Prometheus that scrapes it."""

    cluster: Cluster
    prometheus: Prometheus

    def targets(self) -> list[str]:
        """Addresses of the router and of all ready workers."""
        router = self.cluster.base_url.removeprefix("http://")
        return [router, *(worker.http_address for worker in self.cluster.view().workers if worker.ready)]

    def until(self, promql: str, what: str, *, timeout_s: float = _SCRAPED_S) -> None:
        """Waits until a query has a result."""
        self.cluster.until(lambda: self.prometheus.query(promql), what, timeout_s=timeout_s)

    def alert(self, name: str, *, timeout_s: float = _SCRAPED_S) -> dict[str, str]:
        """Waits until the alert is pending or firing. Returns its annotations."""
        found = self.cluster.until(lambda: self.prometheus.alerts().get(name), name, timeout_s=timeout_s)
        annotations: dict[str, str] = found["annotations"]
        return annotations


@pytest.fixture(scope="module")
def state_url() -> Iterator[str]:
    """A Redis for stored responses, whose memory is watched."""
    redis = PrivateRedis()
    with asyncio.Runner() as runner:
        runner.run(redis.__aenter__())
        try:
            yield redis.url
        finally:
            runner.run(redis.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, state_url: str) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("live")
    flags = ("--local-prefill", "threshold", "--local-prefill-threshold", str(_LOCAL_TOKENS), "--max-model-len", "1024")
    # Longer than the alerts take: a test stops a worker until they have seen it.
    flags += ("--hang-timeout-s", "3600", "--state-url", state_url)
    with running_cluster(directory, *flags) as cluster:
        router = cluster.base_url.removeprefix("http://")
        addresses = [router, *(worker.http_address for worker in cluster.view().workers)]
        rules = sorted(RULES.glob("*.yaml"))
        (directory / "prometheus").mkdir()
        with running_prometheus(directory / "prometheus", targets=addresses, rules=rules) as prometheus:
            watched = Watched(cluster, prometheus)
            # Counters that rise after the first scrape have a rate.
            watched.until("count(pdserve_ready == 1) == 3 and sum(up) == 3", "router and two workers are scraped")
            asyncio.run(_send_requests(cluster))
            watched.until(
                'sum(pdserve_request_outcomes_total{outcome="finished"}) >= 8'
                ' and sum(pdserve_request_outcomes_total{outcome="cancelled"}) >= 1'
                " and sum(pdserve_handover_gap_seconds_count) >= 2",
                "the requests are in the metrics",
            )
            # Their group has an interval of its own.
            for record in sorted(recorded()):
                watched.until(record, f"{record} has a value")
            yield watched


async def _send_requests(cluster: Cluster) -> None:
    """Streams through the prefill tier, short prompts that decode prefills, one cancelled, and one refused."""
    client = cluster.async_client()
    # The second time, the prefixes are cached.
    for _ in range(2):
        await asyncio.gather(*(_complete(client, f"{number} " * 200) for number in range(2)))
        await asyncio.gather(*(_complete(client, f"Say {number}") for number in range(2)))
    stream = await client.completions.create(model=MODEL, prompt="Count", max_tokens=500, stream=True)
    async for _ in stream:
        break
    await stream.close()
    with pytest.raises(openai.BadRequestError):
        await _complete(client, "word " * 4000)
    await client.close()


async def _complete(client: openai.AsyncOpenAI, prompt: str) -> None:
    stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, stream=True, seed=1)
    async for _ in stream:
        pass


def _as_sent(query: Query, instance: str) -> str:
    """The query as Grafana sends it when it shows this cluster and this worker."""
    variables = {"$model_name": MODEL, "$namespace": ".*", "$instance": instance, "$__rate_interval": "5m"}
    text = query.promql
    for name, value in variables.items():
        text = text.replace(name, value)
    return text


def _empty(watched: Watched, dashboard: Dashboard) -> list[str]:
    """Panels with a query that has no data; for one worker, on neither tier."""
    workers = [worker.http_address for worker in watched.cluster.view().workers]
    return [
        f"{dashboard.name}: {panel.title}: {query.expr}"
        for panel in dashboard.panels
        for query in panel.queries
        if not any(watched.prometheus.query(_as_sent(query, worker)) for worker in workers)
    ]


def test_the_panels_that_a_fault_fills_exist() -> None:
    assert FILLED_BY_A_FAULT.keys() <= {panel.title for panel in _panels()}


def test_all_rules_evaluate_without_error(watched: Watched) -> None:
    rules = watched.prometheus.rules
    watched.cluster.until(
        lambda: all(rule["health"] != "unknown" for rule in rules()), "all rules are evaluated", timeout_s=_SCRAPED_S
    )
    loaded = rules()
    assert {rule["name"] for rule in loaded} == alerts().keys() | recorded()
    assert [rule for rule in loaded if rule["health"] != "ok" or rule.get("lastError")] == []


def test_a_healthy_cluster_has_no_alert(watched: Watched) -> None:
    assert watched.prometheus.alerts().keys() - DEPENDS_ON_THE_MACHINE == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_panel_has_data(watched: Watched, dashboard: Dashboard) -> None:
    def is_expected(line: str) -> bool:
        return any(f": {title}: " in line for title in FILLED_BY_A_FAULT)

    assert [line for line in _empty(watched, dashboard) if not is_expected(line)] == []


def test_a_redis_that_hangs_is_seen_and_its_return_too(watched: Watched) -> None:
    redis = watched.cluster.kill("redis", signal.SIGSTOP)
    try:
        annotations = watched.alert("PdserveRedisAway")
        assert annotations["summary"] == f"{MODEL}: a router cannot reach Redis"
    finally:
        redis.send_signal(signal.SIGCONT)
    watched.until('max(pdserve_degraded{subject="redis"}) == 0', "Redis is back")
    watched.cluster.until(
        lambda: "PdserveRedisAway" not in watched.prometheus.alerts(),
        "the alert on Redis is over",
        timeout_s=_SCRAPED_S,
    )


def test_a_decode_worker_that_stands_still_and_is_killed_is_seen_with_its_reason(watched: Watched) -> None:
    """It comes last: the restarted worker has another port."""
    worker = watched.cluster.kill("decode-0", signal.SIGSTOP)
    watched.alert("PdserveNoDecodeWorker")
    watched.alert("PdserveTargetDown")
    worker.kill()
    watched.cluster.wait_tiers(prefill=1, decode=1)
    watched.prometheus.set_targets(watched.targets())
    annotations = watched.alert("PdserveOutOfMemoryUnderLoad")
    assert "ended while serving: killed." in annotations["description"]
    # Prometheus writes <no value> and <error ...> where a template cannot be filled.
    assert not any("<" in text for text in annotations.values())
    [last_exit] = [panel for panel in _panels() if panel.title == "Last exit"]
    for query in last_exit.queries:
        [decode] = watched.cluster.workers("decode")
        assert watched.prometheus.query(_as_sent(query, decode.http_address))
    _every_metric_has_been_scraped(watched.prometheus)


def _panels() -> list[Panel]:
    return [panel for dashboard in DASHBOARDS for panel in dashboard.panels]


def _every_metric_has_been_scraped(prometheus: Prometheus) -> None:
    queries = [str(rule["expr"]) for rule in all_rules()]
    queries += [_as_sent(query, "any") for panel in _panels() for query in panel.queries]
    needed = {selector.name for query in queries for selector in selectors(query)}
    scraped = set(prometheus.get("/api/v1/label/__name__/values"))
    assert {name for name in needed - scraped if not name.startswith(_ELSEWHERE)} == set()
