"""The probes report whether a process is alive and ready, and if not, why."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.openmetrics import parser as openmetrics_parser

from pdserve.base.errors import SetupError
from pdserve.net.admin import Health, bound_socket, serve_admin
from pdserve.observe.metrics import HistogramReader, TokenHistogram, process_registry


async def _get(address: str, path: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"http://{address}{path}") as response:
        return response.status, await response.text()


async def test_a_worker_is_alive_while_loading_and_ready_after() -> None:
    health, registry = Health(), CollectorRegistry()
    async with serve_admin(health, registry, bound_socket("127.0.0.1", 0, flag="--http-port")) as address:
        assert (await _get(address, "/livez"))[0] == 200
        status, body = await _get(address, "/readyz")
        assert status == 503
        assert "loading" in body
        health.not_ready = None
        assert (await _get(address, "/readyz"))[0] == 200
        health.dead = "the step loop failed"
        assert (await _get(address, "/livez"))[0] == 503
        assert "the step loop failed" in (await _get(address, "/health"))[1]


async def test_no_answer_says_which_versions_of_libraries_run() -> None:
    """Fails without `SERVER_SOFTWARE` of its own: aiohttp's names its version and that of Python.

    The second answer is to broken HTTP, which reaches no application.
    """
    with bound_socket("127.0.0.1", 0, flag="--http-port") as listener:
        async with serve_admin(Health(), CollectorRegistry(), listener) as address:
            for sent in (b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", b"GET\x01\r\n\r\n"):
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(sent)
                answer = await reader.read()
                writer.close()
                assert re.findall(rb"(?im)^server: (.*?)\r$", answer) == [b"pdserve"]
                assert not re.search(rb"(?i)aiohttp|python", answer)


async def test_metrics_are_served_in_prometheus_text_format() -> None:
    registry = CollectorRegistry()
    Gauge("pdserve_test", "test", registry=registry).set(7)
    async with serve_admin(Health(), registry, bound_socket("127.0.0.1", 0, flag="--http-port")) as address:
        assert "pdserve_test 7.0" in (await _get(address, "/metrics"))[1]


async def test_openmetrics_is_served_on_request_and_has_exemplars() -> None:
    registry = process_registry()
    waited = Histogram("pdserve_wait_seconds", "test", registry=registry, buckets=(1.0, 2.0))
    waited.observe(1.5, {"request_id": "cmpl-1"})
    HistogramReader(registry, "gap_seconds", "Gaps", TokenHistogram((1.0,), {"tier": "decode"}))
    async with serve_admin(Health(), registry, bound_socket("127.0.0.1", 0, flag="--http-port")) as address:
        # What Prometheus sends.
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
        _, negotiated = await _get(address, "/metrics", Accept=accept)
        _, plain = await _get(address, "/metrics")
    families = {family.name: family for family in openmetrics_parser.text_string_to_metric_families(negotiated)}
    exemplars = [sample.exemplar for sample in families["pdserve_wait_seconds"].samples if sample.exemplar]
    assert [(exemplar.labels, exemplar.value) for exemplar in exemplars] == [({"request_id": "cmpl-1"}, 1.5)]
    assert {"process_resident_memory_bytes", "pdserve_gap_seconds"} <= families.keys()
    assert "cmpl-1" not in plain


@pytest.mark.parametrize("version", ["1.x", "", "a.b.c", "1.0.0 0"])
async def test_a_version_that_is_none_gets_the_metrics(version: str) -> None:
    registry = CollectorRegistry()
    Gauge("pdserve_test", "test", registry=registry).set(7)
    async with serve_admin(Health(), registry, bound_socket("127.0.0.1", 0, flag="--http-port")) as address:
        for kind in ("application/openmetrics-text", "text/plain"):
            status, text = await _get(address, "/metrics", Accept=f"{kind};version={version}")
            assert (status, "pdserve_test 7.0" in text) == (200, True)


def test_a_taken_port_is_named_with_the_flag_to_change() -> None:
    first = bound_socket("127.0.0.1", 0, flag="--port")
    with first, pytest.raises(SetupError, match=r"Address already in use.*--port"):
        bound_socket("127.0.0.1", first.getsockname()[1], flag="--port")
