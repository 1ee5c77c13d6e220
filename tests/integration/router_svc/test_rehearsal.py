"""A router that a supervisor waits for sends a request of its own before it reports that it is ready."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base.errors import RequestError
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import Tier
from router_svc import rehearsal as subject
from router_svc.rehearsal import rehearsal
from tests.integration.router_svc.conftest import open_cluster
from tests.integration.router_svc.script import Fault, Script, failing, hang
from tests.support.deadline import DEADLINE_S

ONE_OF_EACH: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the router's reports arrive."""
    address = f"@pdserve-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + address[1:])
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        yield listener


async def reports_until_ready(supervisor: socket.socket) -> list[str]:
    reports: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while "READY=1" not in (reports[-1] if reports else ""):
            reports.append((await asyncio.get_running_loop().sock_recv(supervisor, 1000)).decode())
    return reports


async def test_the_first_request_is_the_routers_own_and_leaves_no_trace(
    supervisor: socket.socket, redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH) as cluster:
        reports = await reports_until_ready(supervisor)
        assert "STATUS=sending a first request through the cluster" in reports
        # It went over both tiers, and its prompt is nobody else's.
        [prefill], [decode] = cluster.calls.prefills, cluster.calls.decode_starts
        assert prefill.ref.request_id == decode.ref.request_id
        assert prefill.ref.request_id.startswith("rehearsal-")
        assert await cluster.get("/v1/requests") == (200, {"requests": []})
        assert await cluster.metric("requests_received_total") == 0
        assert await cluster.metric("prompt_tokens_total") == 0
        assert (await cluster.complete())[0] == 200
        assert await cluster.metric("requests_received_total") == 1


@pytest.mark.parametrize("fault", [failing(RequestError("impossible")), hang])
async def test_a_cluster_that_fails_it_is_ready_all_the_same(
    supervisor: socket.socket,
    redis_server: PrivateRedis,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
) -> None:
    monkeypatch.setattr(subject, "_TIMEOUT_S", 1.0)
    monkeypatch.setattr(Script, "reach", lambda self, point, context: fault(context))
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH):
        assert "READY=1" in (await reports_until_ready(supervisor))[-1]
    assert "rehearsal_failed" in {record.getMessage() for record in caplog.records}


async def test_without_a_supervisor_nothing_is_sent(
    redis_server: PrivateRedis, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH) as cluster:
        assert (await cluster.complete())[0] == 200
        assert len(cluster.calls.decode_starts) == 1


def test_the_prompt_is_handed_over_and_fits_the_model() -> None:
    def prompt(**settings: int) -> tuple[int, ...]:
        defaults = {"local_prefill_threshold": 64, "max_model_len": 4096, "vocab_size": 50}
        return rehearsal(**(defaults | settings)).prompt

    assert len(prompt()) > 64
    assert max(prompt()) < 50
    assert len(prompt(local_prefill_threshold=2**31)) == 256
    assert len(prompt(max_model_len=32)) < 32
    assert prompt(max_model_len=4) == (0,)
    assert rehearsal(local_prefill_threshold=0, max_model_len=99, vocab_size=9).cache_salt != b""
