"""The recording rules that tiers are scaled by, evaluated by promtool: what they are, and when they are nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.autoscaling.scenarios import BACKLOG, DEMAND, RULES, STREAMS, Cluster, promtool_test
from tests.support.tools import tool

pytestmark = pytest.mark.deploy

M = ("m", "n")
Check = Callable[..., None]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks records of these clusters: a number each, or None where there must be no series."""
    promtool = tool("promtool")

    def check(*clusters: Cluster, **records: float | None) -> None:
        names = {"backlog": BACKLOG, "demand": DEMAND, "streams": STREAMS}
        expected = {names[key]: {} if value is None else {M: value} for key, value in records.items()}
        run(promtool, tmp_path, list(clusters), expected)

    return check


def run(
    promtool: Path, tmp_path: Path, clusters: list[Cluster], expected: dict[str, dict[tuple[str, str], float]]
) -> None:
    path = tmp_path / "test.yaml"
    path.write_text(promtool_test(clusters, expected), encoding="utf-8")
    result = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def idle() -> Cluster:
    return Cluster().ready(prefill=2, decode=1).prefill("p0").prefill("p1").decode("d0")


def test_the_rules_are_valid() -> None:
    subprocess.run([tool("promtool"), "check", "rules", RULES], check=True, capture_output=True)


def test_an_idle_cluster_asks_for_nothing_which_is_a_number(check: Check) -> None:
    check(idle(), backlog=0, demand=0, streams=0)


def test_the_backlog_is_the_sum_over_the_tier(check: Check) -> None:
    flood = (
        idle().prefill("p0", prefill_backlog_seconds=4, num_requests_waiting=3).prefill("p1", prefill_backlog_seconds=8)
    )
    check(flood, backlog=12)


def test_the_queue_of_the_router_belongs_to_the_tier_that_has_the_admitted_requests(check: Check) -> None:
    queue = {"num_requests_waiting": 16, "num_requests_running": 8, "prefill_backlog_seconds": 6}
    computing = {"num_requests_running": 2, "num_requests_waiting": 6, "prefill_backlog_seconds": 3}
    at_prefill = idle().prefill("p0", **computing).replace("router", "r0", **queue)
    check(at_prefill, backlog=3 + 6, demand=0, streams=24)
    at_decode = idle().decode("d0", num_requests_running=8).replace("router", "r0", **queue)
    check(at_decode, backlog=0, demand=1 + 16 / 8, streams=24)
    # Half of the admitted requests are in each tier.
    both = idle().prefill("p0", **computing).decode("d0", num_requests_running=8).replace("router", "r0", **queue)
    check(both, backlog=3 + 6 / 2, demand=1 + 16 / 2 / 8, streams=24)


def test_a_queue_without_any_admitted_request_waits_for_decode(check: Check) -> None:
    lost = idle().replace("router", "r0", num_requests_waiting=16, prefill_backlog_seconds=6)
    check(lost, backlog=0, demand=2)


def test_decode_demand_counts_held_reserved_and_waiting_blocks_in_workers(check: Check) -> None:
    first = {"kv_blocks_held": 500, "kv_blocks_reserved": 100, "kv_blocks_waiting": 900}
    busy = Cluster().ready(prefill=1, decode=2).prefill("p0").decode("d0", **first).decode("d1", kv_blocks_held=250)
    check(busy, demand=1.5 + 0.25)


def test_of_blocks_and_sequences_the_scarcer_counts_for_each_worker(check: Check) -> None:
    many_short = {"kv_blocks_held": 100, "num_requests_running": 6, "num_requests_waiting": 2}
    few_long = {"kv_blocks_held": 700, "num_requests_running": 2}
    busy = Cluster().ready(prefill=1, decode=2).prefill("p0").decode("d0", **many_short).decode("d1", **few_long)
    check(busy, demand=1.0 + 0.7)


def test_one_sample_among_others_counts_for_its_share_of_a_minute(check: Check) -> None:
    # The sample at 4 min 30 s is one of four. That at 4 min is on the edge, which newer versions leave out.
    spike = idle().prefill("p0", prefill_backlog_seconds="0x15 2.5 0 10 0x20")
    check(spike, backlog=2.5)


def test_a_worker_that_is_not_scraped_leaves_no_value(check: Check) -> None:
    busy = {"prefill_backlog_seconds": 5}
    check(idle().prefill("p0", **busy).without("p1"), backlog=None, demand=0, streams=0)
    check(idle().without("d0"), backlog=0, demand=None)


def test_a_worker_whose_series_end_leaves_no_value_until_routers_have_noticed(check: Check) -> None:
    ends = {"prefill_backlog_seconds": "5x10 stale", "kv_blocks": "100x10 stale"}
    gone = {**ends, "num_requests_running": "0x10 stale", "num_requests_waiting": "0x10 stale"}
    check(idle().prefill("p1", **gone), backlog=None)
    noticed = idle().prefill("p1", **gone).replace("prefill", "r0", workers_ready="2x12 1x20")
    # Nothing of the last minute of the worker that is gone is left, either.
    check(noticed, backlog=0)


def test_a_backlog_that_is_not_known_leaves_no_value(check: Check) -> None:
    unknown = {"prefill_backlog_seconds": "_x30", "num_requests_waiting": 3}
    check(idle().prefill("p0", **unknown), backlog=None, demand=0)
    check(idle().replace("router", "r0", prefill_backlog_seconds="_x30"), backlog=None, demand=0)


def test_without_a_router_there_is_no_value(check: Check) -> None:
    check(idle().without("r0"), backlog=None, demand=None, streams=None)
    check(backlog=None, demand=None, streams=None)


def test_a_worker_that_still_loads_neither_counts_nor_makes_a_value_nan(check: Check) -> None:
    loading = {"kv_blocks": 0, "max_num_seqs": 0}
    check(
        idle().prefill("p2", kv_blocks=0).decode("d1", **loading).decode("d0", kv_blocks_held=500),
        backlog=0,
        demand=0.5,
    )
    # It does not stand in for one that should be scraped.
    check(idle().prefill("p2", kv_blocks=0).without("p1"), backlog=None)


def test_a_cluster_without_a_prefill_tier_scales_its_decode_tier(check: Check) -> None:
    alone = Cluster().ready(prefill=0, decode=1).decode("d0", num_requests_running=8)
    check(alone.replace("router", "r0", num_requests_waiting=4), backlog=None, demand=1.5)


def test_several_routers_add_up_and_agree_on_the_workers(check: Check) -> None:
    two = idle().prefill("p0", num_requests_running=1)
    two.ready(prefill=2, decode=1, router="r1")
    for router, seconds in (("r0", 2), ("r1", 3)):
        two.replace("router", router, prefill_backlog_seconds=seconds, num_requests_waiting=5, num_requests_running=1)
    check(two, backlog=5, demand=0, streams=12)


def test_each_model_and_namespace_has_a_series_of_its_own(tmp_path: Path) -> None:
    clusters = []
    expected: dict[tuple[str, str], float] = {}
    for number, (model, namespace) in enumerate((("a", "n"), ("b", "n"), ("a", "")), 1):
        cluster = Cluster(model=model, namespace=namespace).ready(prefill=1, decode=1)
        clusters.append(cluster.prefill("p0", prefill_backlog_seconds=number).decode("d0"))
        expected[model, namespace] = float(number)
    run(tool("promtool"), tmp_path, clusters, {BACKLOG: expected, DEMAND: dict.fromkeys(expected, 0.0)})
