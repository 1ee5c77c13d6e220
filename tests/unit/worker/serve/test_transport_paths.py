"""What a worker reports about the paths of its blocks: metrics, readiness detail, registry and log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest

from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport.inproc import InprocTransport
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.ids import WorkerId
from pdserve.net.admin import Health
from pdserve.peers.host_identity import own_host_identity
from pdserve.peers.workers import TransportReport
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.transport_paths import MAX_PEERS, TransportPaths
from tests.support.tickets import a_ticket


@dataclass
class FakePeer:
    """A connection with these lanes."""

    used_lanes: tuple[str, ...]
    closed: bool = False
    #: That of messages in the memory of a GPU.
    protocol: str = ""


class LaneTransport(InprocTransport):
    """A transport that reports the lanes of its fake peers."""

    def offered_lanes(self) -> tuple[str, ...]:
        return ("tcp", "cma")

    def lanes(self, peer: object) -> tuple[str, ...]:
        assert isinstance(peer, FakePeer)
        return peer.used_lanes

    def protocol(self, peer: object, *, device_memory: bool) -> str:
        assert isinstance(peer, FakePeer)
        return peer.protocol if device_memory else "zero-copy"


class Watched:
    """The paths of a worker, and where it reports them."""

    def __init__(self, transport: InprocTransport | None = None, *, device_memory: bool = False) -> None:
        self.metrics = WorkerMetrics(model_name="m", tier="prefill")
        self.health = Health(not_ready=None)
        self.paths = TransportPaths(transport or LaneTransport(), self.metrics, device_memory=device_memory)
        self.paths.on_change = self.health.watch("transport")

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        ]

    @property
    def is_degraded(self) -> bool:
        [(_, value)] = self.samples("pdserve_transport_degraded")
        return value == 1


def ticket_of(worker: str, *, ipc_namespace: int | None = None) -> Ticket:
    host = own_host_identity()
    end = DataEndpoint(
        host=host if ipc_namespace is None else replace(host, ipc_namespace=ipc_namespace), lanes=("tcp", "cma")
    )
    return replace(a_ticket(), worker_id=WorkerId(worker), data_endpoint=end)


CMA, TCP = ("tcp", "cma"), ("tcp",)


def test_an_expected_path_is_reported_and_degrades_nothing() -> None:
    worker = Watched()
    worker.paths.observe(ticket_of("decode-0"), FakePeer(CMA))
    [(labels, value)] = worker.samples("pdserve_transport_path_info")
    assert value == 1
    assert labels == {
        "model_name": "m",
        "tier": "prefill",
        "peer": "decode-0",
        "expected": "cma",
        "actual": "cma",
    }
    assert not worker.is_degraded
    assert worker.health.degraded == {}
    assert worker.paths.report() == TransportReport(paths={"cma": 1})


def test_tcp_within_a_host_is_reported_everywhere_with_cause_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    worker = Watched()
    with caplog.at_level(logging.WARNING):
        worker.paths.observe(ticket_of("decode-0", ipc_namespace=1), FakePeer(TCP))
    [record] = caplog.records
    assert record.getMessage() == "transport_degraded"
    assert worker.is_degraded
    reason = worker.health.degraded["transport"]
    assert reason.startswith("to decode-0: tcp instead of cma: the workers are in different IPC namespaces. Put both")
    assert worker.health.is_ready
    assert worker.paths.report() == TransportReport(paths={"tcp": 1}, degraded=reason)


def test_tcp_that_ucx_tls_asks_for_degrades_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "^posix,sysv,cma,cuda_ipc")
    worker = Watched()
    worker.paths.observe(ticket_of("decode-0", ipc_namespace=1), FakePeer(TCP))
    assert worker.health.degraded == {}
    assert worker.paths.report() == TransportReport(paths={"tcp": 1})


def test_a_known_connection_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    worker, peer = Watched(), FakePeer(TCP)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            worker.paths.observe(ticket_of("decode-0", ipc_namespace=1), peer)
        # A new connection that takes the same path is no news.
        worker.paths.observe(ticket_of("decode-0", ipc_namespace=1), FakePeer(TCP))
    assert len(caplog.records) == 1


def test_a_faster_connection_ends_the_degradation() -> None:
    worker = Watched()
    worker.paths.observe(ticket_of("decode-0", ipc_namespace=1), FakePeer(TCP))
    worker.paths.observe(ticket_of("decode-0"), FakePeer(CMA))
    assert not worker.is_degraded
    assert worker.health.degraded == {}
    assert [labels["actual"] for labels, _ in worker.samples("pdserve_transport_path_info")] == ["cma"]


def test_how_blocks_of_a_gpu_are_sent_is_reported_once_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    worker, peer = Watched(device_memory=True), FakePeer(("tcp", "cma", "cuda_ipc"))
    ticket = ticket_of("decode-0")
    assert ticket.data_endpoint is not None
    ticket = replace(ticket, data_endpoint=replace(ticket.data_endpoint, device_memory=True))
    worker.paths.observe(ticket, peer)
    worker.paths.sweep()
    assert not worker.is_degraded
    peer.protocol = "rendezvous cuda_copy, fenced write to remote, frag host"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            worker.paths.sweep()
    [record] = caplog.records
    assert record.getMessage() == "transport_degraded"
    assert worker.is_degraded
    reason = worker.health.degraded["transport"]
    assert reason.startswith(
        "to decode-0: cuda_ipc: UCX copies blocks of the GPU through fragments of host memory (rend"
    )
    assert worker.paths.report() == TransportReport(paths={"cuda_ipc": 1}, degraded=reason)


def test_the_path_of_an_ended_connection_is_forgotten() -> None:
    worker, peer = Watched(), FakePeer(TCP)
    worker.paths.observe(ticket_of("decode-0", ipc_namespace=1), peer)
    worker.paths.sweep()
    assert worker.is_degraded
    peer.closed = True
    worker.paths.sweep()
    assert not worker.is_degraded
    assert worker.samples("pdserve_transport_path_info") == []
    assert worker.health.degraded == {}


def test_the_number_of_series_is_bounded_and_the_latest_used_peers_stay() -> None:
    worker, first = Watched(), FakePeer(CMA)
    worker.paths.observe(ticket_of("first"), first)
    for number in range(MAX_PEERS - 1):
        worker.paths.observe(ticket_of(f"decode-{number}"), FakePeer(CMA))
    worker.paths.observe(ticket_of("first"), first)
    worker.paths.observe(ticket_of("last"), FakePeer(CMA))
    peers = [labels["peer"] for labels, _ in worker.samples("pdserve_transport_path_info")]
    assert len(peers) == MAX_PEERS
    assert {"first", "last"} <= set(peers)
    assert "decode-0" not in peers


def test_a_transport_without_lanes_reports_no_path() -> None:
    worker = Watched(InprocTransport())
    worker.paths.observe(ticket_of("decode-0"), FakePeer(TCP))
    assert worker.paths.own_endpoint() is None
    assert worker.samples("pdserve_transport_path_info") == []
    assert worker.paths.report() == TransportReport()


def test_a_peer_that_does_not_say_where_it_runs_has_no_expected_path() -> None:
    worker = Watched()
    worker.paths.observe(replace(ticket_of("decode-0"), data_endpoint=None), FakePeer(TCP))
    assert worker.paths.report() == TransportReport()
