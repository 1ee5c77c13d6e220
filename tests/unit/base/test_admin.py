"""The probes report whether a process is alive and ready, and if not, why."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge

from pdserve.base.admin import Health, bound_socket, serve_admin
from pdserve.base.errors import SetupError


async def _get(address: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as response:
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


async def test_metrics_are_served_in_prometheus_text_format() -> None:
    registry = CollectorRegistry()
    Gauge("pdserve_test", "test", registry=registry).set(7)
    async with serve_admin(Health(), registry, bound_socket("127.0.0.1", 0, flag="--http-port")) as address:
        assert "pdserve_test 7.0" in (await _get(address, "/metrics"))[1]


def test_a_taken_port_is_named_with_the_flag_to_change() -> None:
    first = bound_socket("127.0.0.1", 0, flag="--port")
    with first, pytest.raises(SetupError, match=r"Address already in use.*--port"):
        bound_socket("127.0.0.1", first.getsockname()[1], flag="--port")
