"""Each fault of a running cluster is found, named and has a remedy; a healthy cluster has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.cli.doctor.cluster_checks import check_cluster, check_redis
from pdserve.cli.doctor.facts import ClusterFacts, PairProbe, RouterFacts, SeenWorker, choose_pairs
from pdserve.cli.doctor.finding import Finding, Severity, exit_status
from pdserve.observe.facts.cluster import RedisFacts, WorkerFacts
from tests.support.machine import MACHINE, REDIS, worker_facts

PAIR = PairProbe(
    prefill="prefill-0",
    decode="decode-0",
    num_bytes=32 << 20,
    bytes_per_s=5e9,
    memory_copy_bytes_per_s=20e9,
    expected="cma",
    actual="cma",
)


def seen(worker_id: str, tier: str) -> SeenWorker:
    return SeenWorker(
        worker_id=worker_id, tier=tier, is_ready=True, grpc_address="h:1", facts=worker_facts(worker_id, tier)
    )


HEALTHY = ClusterFacts(
    router=RouterFacts(base_url="http://r", is_ready=True, reason="", degraded={}, version="1.0.0", has_redis=True),
    workers=(seen("prefill-0", "prefill"), seen("decode-0", "decode")),
    pairs=(PAIR,),
    num_pairs=1,
)


def with_router(**changes: object) -> ClusterFacts:
    return replace(HEALTHY, router=replace(HEALTHY.router, **changes))  # type: ignore[arg-type]


def with_decode(**changes: object) -> ClusterFacts:
    prefill, decode = HEALTHY.workers
    return replace(HEALTHY, workers=(prefill, replace(decode, **changes)))  # type: ignore[arg-type]


def with_decode_facts(change: Callable[[WorkerFacts], WorkerFacts]) -> ClusterFacts:
    facts = HEALTHY.workers[1].facts
    assert facts is not None
    return with_decode(facts=change(facts))


def with_pair(**changes: object) -> ClusterFacts:
    return replace(HEALTHY, pairs=(replace(PAIR, **changes),))  # type: ignore[arg-type]


def faults(cluster: ClusterFacts) -> list[Finding]:
    return [finding for finding in check_cluster(cluster) if finding.severity is not Severity.OK]


def test_a_healthy_cluster_needs_nothing() -> None:
    assert faults(HEALTHY) == []
    [transfer] = [finding for finding in check_cluster(HEALTHY) if finding.check == "transfers"]
    assert transfer.found == "cma, 5.00 GB/s, 25% of a plain copy"


@pytest.mark.parametrize(
    ("cluster", "check", "subject", "severity", "words"),
    [
        (with_router(is_ready=False, reason="loading"), "router", "router", Severity.ERROR, "not ready: loading"),
        (with_router(degraded={"prefill": "none ready"}), "degraded", "router", Severity.WARNING, "prefill: none"),
        (with_router(has_redis=False), "redis", "router", Severity.ERROR, "cannot be used"),
        (with_router(version="2.0.0"), "versions", "cluster", Severity.WARNING, "2.0.0: the router"),
        (
            with_decode(facts=None, error="connection refused"),
            "reachable",
            "decode-0",
            Severity.WARNING,
            "h:1 does not answer here: connection refused",
        ),
        (
            with_decode(facts=None, error="failed with gRPC code UNIMPLEMENTED: Method not found!"),
            "versions",
            "decode-0",
            Severity.WARNING,
            "cannot be examined",
        ),
        (
            with_decode_facts(lambda facts: replace(facts, layout=replace(facts.layout, block_size=32))),
            "layouts",
            "decode-0",
            Severity.ERROR,
            "block_size is 32, and 16 on prefill-0",
        ),
        (
            with_decode_facts(lambda facts: replace(facts, transport="nccl")),
            "layouts",
            "cluster",
            Severity.WARNING,
            "different transports: ucx: prefill-0; nccl: decode-0",
        ),
        (
            with_decode_facts(lambda facts: replace(facts, instruction_set="avx2")),
            "instruction_sets",
            "cluster",
            Severity.WARNING,
            "avx512: prefill-0; avx2: decode-0",
        ),
        (with_decode(clock_skew_s=-2.0), "clocks", "decode-0", Severity.WARNING, "2.0 s behind"),
        (with_decode(clock_skew_s=60.0), "clocks", "decode-0", Severity.ERROR, "60.0 s ahead of"),
        (
            with_decode_facts(lambda facts: replace(facts, redis=RedisFacts(address="redis:6379", error="no answer"))),
            "redis",
            "decode-0",
            Severity.ERROR,
            "no answer",
        ),
        (
            with_decode_facts(lambda facts: replace(facts, redis=replace(REDIS, address="other:6379"))),
            "redis",
            "workers",
            Severity.WARNING,
            "2 addresses of Redis: other:6379, redis:6379",
        ),
        (
            with_pair(actual="tcp", cause="the workers are in different IPC namespaces", remedy="Join them."),
            "transfers",
            "prefill-0 to decode-0",
            Severity.WARNING,
            "tcp instead of cma: the workers are in different IPC namespaces; 5.00 GB/s",
        ),
        (
            with_pair(protocol="rendezvous", bytes_per_s=0.1e9),
            "transfers",
            "prefill-0 to decode-0",
            Severity.WARNING,
            "cma (rendezvous), 0.10 GB/s",
        ),
        (with_pair(error="lost it"), "transfers", "prefill-0 to decode-0", Severity.ERROR, "failed: lost it"),
        (with_pair(bytes_per_s=0.1e9), "transfers", "prefill-0 to decode-0", Severity.WARNING, "slow for this path"),
        (with_pair(is_busy=True), "transfers", "prefill-0 to decode-0", Severity.INFO, "not tested"),
        (replace(HEALTHY, num_pairs=5), "transfers", "workers", Severity.INFO, "1 of 5 pairs"),
        (
            with_decode_facts(lambda facts: replace(facts, machine=replace(MACHINE, open_files=300))),
            "open_files",
            "decode-0",
            Severity.ERROR,
            "300 open files",
        ),
    ],
)
def test_a_fault_is_found_with_its_remedy(
    cluster: ClusterFacts, check: str, subject: str, severity: Severity, words: str
) -> None:
    [finding] = faults(cluster)
    assert (finding.check, finding.subject, finding.severity) == (check, subject, severity)
    assert words in finding.found
    assert finding.remedy.endswith(".")


SLOW = {"actual": "tcp", "cause": "different IPC namespaces", "remedy": "Join them."}


@pytest.mark.parametrize(("pair", "check"), [({"is_busy": True}, "degraded"), ({}, "degraded"), (SLOW, "transfers")])
def test_a_slow_path_is_found_once_also_where_no_test_transfer_could_see_it(
    pair: dict[str, object], check: str
) -> None:
    cluster = replace(with_pair(**pair), router=replace(HEALTHY.router, degraded={"transport": "to decode-0: tcp"}))
    warnings = [finding for finding in faults(cluster) if finding.severity is Severity.WARNING]
    assert [finding.check for finding in warnings] == [check]


def test_tiers_without_workers_are_found() -> None:
    empty = replace(HEALTHY, workers=(), pairs=(), num_pairs=0)
    assert [(finding.subject, finding.severity) for finding in faults(empty)] == [
        ("prefill", Severity.WARNING),
        ("decode", Severity.ERROR),
    ]
    assert exit_status(faults(empty)) == 2


def test_a_worker_that_is_not_ready_is_found() -> None:
    found = [(finding.subject, finding.severity) for finding in faults(with_decode(is_ready=False))]
    assert found == [("decode", Severity.ERROR), ("decode-0", Severity.WARNING)]


def test_a_clock_difference_within_the_error_of_its_measurement_is_none() -> None:
    assert faults(with_decode(clock_skew_s=2.0, clock_error_s=1.9)) == []


@pytest.mark.parametrize(
    ("redis", "severity", "words"),
    [
        (RedisFacts(address="r:1", error="no answer"), Severity.ERROR, "no answer"),
        (replace(REDIS, version="4.0.14"), Severity.ERROR, "no streams"),
        (replace(REDIS, latency_s=0.05), Severity.WARNING, "50 ms away"),
        (replace(REDIS, max_memory_bytes=1 << 30, eviction="allkeys-lru"), Severity.WARNING, "allkeys-lru"),
        (replace(REDIS, max_memory_bytes=11 << 20), Severity.WARNING, "10 of 11 MiB"),
    ],
)
def test_a_fault_of_redis_is_found_with_its_remedy(redis: RedisFacts, severity: Severity, words: str) -> None:
    [finding] = [finding for finding in check_redis(redis, "here") if finding.severity is not Severity.OK]
    assert (finding.check, finding.subject, finding.severity) == ("redis", "here", severity)
    assert words in finding.found
    assert finding.remedy.endswith(".")


def test_a_redis_that_does_not_describe_itself_is_no_fault() -> None:
    assert exit_status(check_redis(RedisFacts(address="r:1", latency_s=0.001), "here")) == 0


def test_what_is_measured_between_gpu_workers_is_said() -> None:
    on_gpu = [(each, each.facts) for each in HEALTHY.workers]
    workers = tuple(replace(each, facts=facts and replace(facts, device="cuda:0")) for each, facts in on_gpu)
    found = check_cluster(replace(HEALTHY, workers=workers))
    [finding] = [each for each in found if each.check == "transfers"]
    assert "of host memory" in finding.found


def test_all_pairs_are_tested_where_there_are_few() -> None:
    assert choose_pairs(["p0", "p1"], ["d0", "d1"], 4) == [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
    assert choose_pairs([], ["d0"], 4) == []


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(10, 10), (3, 40), (40, 3), (2, 1000)])
def test_a_sample_of_many_pairs_is_bounded_and_spread(num_prefill: int, num_decode: int) -> None:
    prefill, decode = [f"p{i}" for i in range(num_prefill)], [f"d{i}" for i in range(num_decode)]
    pairs = choose_pairs(prefill, decode, 16)
    assert len(pairs) == len(set(pairs)) == 16
    assert len({sender for sender, _ in pairs}) == min(16, num_prefill)
    assert len({receiver for _, receiver in pairs}) == min(16, num_decode)


def test_no_pair_is_tested_on_request() -> None:
    assert choose_pairs(["p0"], ["d0"], 0) == []
