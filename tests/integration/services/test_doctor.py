"""`pdserve doctor` finds faults planted on purpose in real workers, in a real Redis and in this process."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.transport.inproc import InprocPeer, InprocTransport
from pdserve import __version__
from pdserve.cli.doctor import DoctorConfig, diagnose
from pdserve.cli.doctor.finding import Finding, Severity, exit_status
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store
from pdserve.worker.serve import diagnostics, transport_paths
from tests.integration.services.local_cluster import LocalCluster, running_cluster
from tests.unit.cli.fake_router import FakeRouter, running
from tests.unit.model.tiny import save_model

SIZE = 64 * 1024


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit of open files that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Lanes(InprocTransport):
    """A transport that reports the lanes of a connection that has to take TCP."""

    def offered_lanes(self) -> tuple[str, ...]:
        return ("tcp", "cma")

    def lanes(self, peer: object) -> tuple[str, ...]:
        assert isinstance(peer, InprocPeer)
        return ("tcp",)

    def protocol(self, peer: object, *, device_memory: bool) -> str:
        return "multi-frag copy-in"


def listed(worker_id: str, tier: str, address: str, **changes: Any) -> dict[str, Any]:
    """A worker in the router's answer."""
    return {
        "worker_id": worker_id,
        "tier": tier,
        "ready": True,
        "epoch": 1,
        "grpc_address": address,
        "http_address": "127.0.0.1:1",
        "max_num_seqs": 8,
        "total_blocks": 100,
        "free_blocks": 100,
        "running": 0,
        "waiting": 0,
        "queued_tokens": 0,
        **changes,
    }


def answer(cluster: LocalCluster, *more: dict[str, Any], **router: Any) -> dict[str, Any]:
    """What a router answers that has these workers."""
    return {
        "router": {"status": "ready", "version": __version__, "model": "tiny", **router},
        "redis": {"available": True},
        "workers": [
            listed("prefill", "prefill", cluster.prefill_address),
            listed("decode", "decode", cluster.decode_address),
            *more,
        ],
    }


def found(findings: list[Finding]) -> set[tuple[str, str]]:
    """Check and subject of everything that needs something done."""
    return {
        (finding.check, finding.subject)
        for finding in findings
        if finding.severity >= Severity.WARNING and finding.remedy
    }


async def diagnosed(page: dict[str, Any], **settings: Any) -> list[Finding]:
    with running(FakeRouter({"/v1/cluster": (200, page)})) as router:
        findings, _ = await diagnose(DoctorConfig(base_url=router.base_url, transfer_size=SIZE, **settings))
    return findings


@pytest.mark.own_redis
async def test_a_dozen_planted_faults_are_found(
    model: Path, redis_server: PrivateRedis, few_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,posix")
    clock = SimpleNamespace(time=lambda: time.time() + 60, monotonic=time.monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(diagnostics, "time", clock)
    async with Store(redis_server.url) as store:
        await store.call("CONFIG", "SET", "maxmemory", "100mb")
        await store.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    # Layouts differ, so that test transfers fail, too. The kernels differ. The workers' Redis is away.
    async with running_cluster(model, decode={"block_size": 8, "kernels": "reference"}) as cluster:
        page = answer(
            cluster,
            listed("decode-gone", "decode", "127.0.0.1:9"),
            listed("prefill-slow", "prefill", cluster.prefill_address, ready=False),
            status="not_ready",
            reason="draining",
            version="0.0.9",
            degraded={"prefill": "no prefill worker is ready"},
        )
        findings = await diagnosed(page, redis_url=redis_server.url)
    assert exit_status(findings) == 2
    planted = {
        ("open_files", "this machine"),
        ("ucx_tls", "this machine"),
        ("redis", "this machine"),
        ("router", "router"),
        ("degraded", "router"),
        ("tiers", "prefill-slow"),
        ("reachable", "decode-gone"),
        ("versions", "cluster"),
        ("layouts", "decode"),
        ("instruction_sets", "cluster"),
        ("clocks", "prefill"),
        ("clocks", "decode"),
        ("redis", "decode"),
        ("transfers", "prefill to decode"),
    }
    assert found(findings) >= planted
    texts = "\n".join(finding.found for finding in findings)
    for words in ("allkeys-lru", "400 open files", "block_size is 8, and 4 on prefill", "60.0 s ahead", "0.0.9"):
        assert words in texts


async def test_tcp_within_a_host_is_found_with_cause_and_speed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = transport_paths.own_host_identity
    namespaces = iter((1, 2))
    monkeypatch.setattr(
        transport_paths, "own_host_identity", lambda: dataclasses.replace(own(), ipc_namespace=next(namespaces))
    )
    async with running_cluster(model, prefill_transport=Lanes(), decode_transport=Lanes()) as cluster:
        findings = await diagnosed(answer(cluster))
    [transfer] = [finding for finding in findings if finding.check == "transfers"]
    assert transfer.severity is Severity.WARNING
    assert transfer.found.startswith("tcp instead of cma: the workers are in different IPC namespaces; ")
    assert "GB/s" in transfer.found
    assert transfer.remedy.startswith("Put both into one.")


async def test_workers_that_serve_are_not_tested_but_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "PAUSE_S", 0.001)
    async with running_cluster(model) as cluster:
        with cluster.prefill.calls.serving():
            findings = await diagnosed(answer(cluster))
    [transfer] = [finding for finding in findings if finding.check == "transfers"]
    assert (transfer.severity, transfer.found) == (Severity.INFO, "not tested: the workers serve requests")


async def test_a_pair_can_be_left_untested(model: Path) -> None:
    async with running_cluster(model) as cluster:
        findings = await diagnosed(answer(cluster), max_pairs=0)
    [transfers] = [finding for finding in findings if finding.check == "transfers"]
    assert transfers.found == "0 of 1 pairs of workers tested"
