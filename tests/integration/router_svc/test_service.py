"""The router in operation: readiness, overload, draining, traces, loss of Redis, and the process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from typing import Any

import aiohttp
import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import TransportReport, WorkerLoad
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import DeltaStream
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.script import Context, hang
from tests.support.deadline import DEADLINE_S
from tests.support.redis import eventually
from tests.support.tiny_model import NAME

ONE_OF_EACH = {"prefill-0": "prefill", "decode-0": "decode"}


async def start_hanging(cluster: ScriptedCluster, count: int = 1) -> list[asyncio.Task[Any]]:
    """Starts requests that run until cancelled."""
    cluster.script.fail("decode", *[hang] * count)
    tasks = [asyncio.create_task(cluster.complete()) for _ in range(count)]
    await cluster.calls.until(lambda: len(cluster.calls.decode_starts) == count)
    return tasks


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_readiness_follows_the_decode_workers(small_cluster: ScriptedCluster) -> None:
    async def answers(status: int) -> bool:
        return (await small_cluster.get("/readyz"))[0] == status

    assert (await small_cluster.get("/readyz"))[0] == 200
    small_cluster.workers["decode-0"].set(ready=False)
    await eventually(lambda: answers(503))
    waiting = asyncio.create_task(small_cluster.complete())
    assert (await small_cluster.get("/livez"))[0] == 200
    assert not waiting.done()
    small_cluster.workers["decode-0"].set(ready=True)
    await eventually(lambda: answers(200))
    assert (await waiting)[0] == 200


async def test_with_an_admin_port_the_apis_port_shows_nothing_of_the_cluster(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, admin_port=0) as cluster:
        assert cluster.admin_url != cluster.base_url
        for path in ("/metrics", "/v1/cluster", "/v1/requests", "/v1/requests/x/trace", "/console/", "/console/events"):
            status, body = await cluster.get(path)
            assert (status, "--admin-port" in body["error"]["message"]) == (404, True), path
        for path in ("/metrics", "/v1/cluster", "/v1/requests", "/console/", "/v1/models", "/readyz"):
            async with cluster.http.get(cluster.admin_url + path) as response:
                assert response.status == 200, path
        for path in ("/livez", "/readyz", "/health", "/v1/models"):
            assert (await cluster.get(path))[0] == 200, path
        assert (await cluster.complete())[0] == 200


async def test_service_is_degraded_without_prefill_workers(small_cluster: ScriptedCluster) -> None:
    async def degraded() -> bool:
        return "prefill" in (await small_cluster.get("/health"))[1]["degraded"]

    small_cluster.workers["prefill-0"].set(ready=False)
    await eventually(degraded)
    assert await small_cluster.metric("degraded", subject="prefill") == 1
    assert (await small_cluster.complete())[0] == 200


async def test_a_slow_path_of_a_worker_degrades_the_service(small_cluster: ScriptedCluster) -> None:
    worker = small_cluster.workers["prefill-0"]
    reason = "to decode-0: tcp instead of cma: why. What to do."
    worker.record = replace(worker.record, transport=TransportReport(paths={"tcp": 1}, degraded=reason))
    await eventually(lambda: _is_degraded(small_cluster, "transport"))
    status, health = await small_cluster.get("/readyz")
    assert (status, health["degraded"]) == (200, {"transport": f"prefill-0 {reason}"})
    assert await small_cluster.metric("degraded", subject="transport") == 1
    _, cluster = await small_cluster.get("/v1/cluster")
    assert cluster["workers"][0]["transport"] == {"paths": {"tcp": 1}, "degraded": reason}
    assert cluster["workers"][1]["transport"] == {"paths": {}, "degraded": None}
    worker.record = replace(worker.record, transport=TransportReport(paths={"cma": 1}))
    await eventually(lambda: _is_well(small_cluster))


async def test_overload_is_refused_with_a_retry_after(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, max_num_queued_reqs=2) as cluster:
        running = await start_hanging(cluster, 8)
        queued = [asyncio.create_task(cluster.complete()) for _ in range(2)]
        await eventually(lambda: _is(cluster, waiting=2))
        async with cluster.http.post(
            f"{cluster.base_url}/v1/completions", json={"model": NAME, "prompt": "x"}
        ) as refusal:
            assert refusal.status == 429
            assert int(refusal.headers["Retry-After"]) >= 1
            error = (await refusal.json())["error"]
        assert error["type"] == "rate_limit_error"
        assert "2 waiting, limit 2" in error["message"]
        assert await cluster.metric("admission_rejections_total", reason="queue_full") == 1
        assert await cluster.metric("num_requests_waiting") == 2
        await cancel(*running)
        assert [status for status, _ in await asyncio.gather(*queued)] == [200, 200]


async def test_a_client_that_fills_the_queue_makes_room_for_another(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, max_num_queued_reqs=4) as cluster:
        running = await start_hanging(cluster, 8)
        queued = [asyncio.create_task(cluster.complete()) for _ in range(4)]
        await eventually(lambda: _is(cluster, waiting=4))
        other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(connector=other) as session:
            body = {"model": NAME, "prompt": "x"}
            second = asyncio.create_task(session.post(f"{cluster.base_url}/v1/completions", json=body))
            [displaced], _ = await asyncio.wait(queued, return_when=asyncio.FIRST_COMPLETED)
            status, refusal = displaced.result()
            assert status == 429
            assert "other clients have fewer requests" in refusal["error"]["message"]
            assert await cluster.metric("admission_rejections_total", reason="displaced") == 1
            assert displaced is queued[-1]
            await cancel(*running)
            assert (await second).status == 200
        assert [(await task)[0] for task in queued[:3]] == [200] * 3


async def test_priorities_need_a_policy_that_takes_them(
    redis_server: PrivateRedis, model_dir: Path, small_cluster: ScriptedCluster
) -> None:
    status, body = await small_cluster.complete(priority=3)
    assert status == 400
    assert body["error"]["param"] == "priority"
    assert "--scheduling-policy priority" in body["error"]["message"]
    assert (await small_cluster.complete(priority=0))[0] == 200
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, scheduling_policy="priority") as cluster:
        assert (await cluster.complete(priority=-3))[0] == 200


async def _is(cluster: ScriptedCluster, *, waiting: int) -> bool:
    return (await cluster.get("/v1/cluster"))[1]["router"]["queued"] == waiting


async def test_a_waiting_client_that_disconnects_leaves_the_queue(small_cluster: ScriptedCluster) -> None:
    running = await start_hanging(small_cluster, 8)
    gone, patient = (asyncio.create_task(small_cluster.complete()) for _ in range(2))
    await eventually(lambda: _is(small_cluster, waiting=2))
    await cancel(gone)
    await eventually(lambda: _is(small_cluster, waiting=1))
    await cancel(*running)
    assert (await patient)[0] == 200
    assert len(small_cluster.calls.decode_starts) == 9


async def test_a_request_that_waits_too_long_in_the_queue_is_refused(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, queue_timeout_s=0.3) as cluster:
        running = await start_hanging(cluster, 8)
        status, body = await cluster.complete()
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert await cluster.metric("admission_rejections_total", reason="queue_timeout") == 1
        await cancel(*running)


async def test_a_worker_with_more_capacity_admits_more_requests(small_cluster: ScriptedCluster) -> None:
    running = await start_hanging(small_cluster, 8)
    waiting = asyncio.create_task(small_cluster.complete())
    await eventually(lambda: _is(small_cluster, waiting=1))
    worker = small_cluster.workers["decode-0"]
    worker.record = replace(worker.record, max_num_seqs=9)
    worker.set(load=WorkerLoad(free_blocks=99))
    assert (await waiting)[0] == 200
    await cancel(*running)


async def test_draining_refuses_new_requests_and_lets_running_streams_finish(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.pace = asyncio.Semaphore(2)
    running = asyncio.create_task(small_cluster.stream())
    await small_cluster.calls.until(lambda: bool(small_cluster.calls.prefills))
    drained = asyncio.create_task(small_cluster.router.drain())
    await eventually(lambda: _answers(small_cluster, "/readyz", 503))
    status, body = await small_cluster.complete()
    assert status == 503
    assert "shutting down" in body["error"]["message"]
    for _ in range(20):
        small_cluster.script.pace.release()
    text, _ = await running
    assert text == "Hello world."
    await drained


async def _answers(cluster: ScriptedCluster, path: str, status: int) -> bool:
    return (await cluster.get(path))[0] == status


async def test_a_drain_ends_after_its_timeout(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, drain_timeout_s=0.1) as cluster:
        running = await start_hanging(cluster)
        await cluster.router.drain()
        assert not running[0].done()
        await cancel(*running)


async def test_traces_outlive_the_routers_memory(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, trace_capacity=1) as cluster:
        _, first = await cluster.complete()
        in_memory = await cluster.trace(first["id"])
        await cluster.complete()

        async def is_stored() -> bool:
            return (await cluster.get(f"/v1/requests/{first['id']}/trace"))[0] == 200

        await eventually(is_stored)
        assert await cluster.trace(first["id"]) == in_memory | {"phases": (await cluster.trace(first["id"]))["phases"]}
        status, body = await cluster.get("/v1/requests/cmpl-unknown/trace")
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        assert (await cluster.get("/v1/requests/a%20b/trace"))[0] == 400


@pytest.mark.own_redis
async def test_serving_continues_while_redis_is_down(
    small_cluster: ScriptedCluster, redis_server: PrivateRedis
) -> None:
    await redis_server.stop(kill=True)
    await eventually(lambda: _is_degraded(small_cluster, "redis"))
    assert (await small_cluster.complete())[0] == 200
    assert (await small_cluster.get("/v1/cluster"))[1]["redis"] == {"available": False}
    assert await small_cluster.metric("degraded", subject="redis") == 1
    await redis_server.start()
    await eventually(lambda: _is_well(small_cluster))


async def _is_degraded(cluster: ScriptedCluster, subject: str) -> bool:
    return subject in (await cluster.get("/health"))[1]["degraded"]


async def _is_well(cluster: ScriptedCluster) -> bool:
    return not (await cluster.get("/health"))[1]["degraded"]


async def test_a_client_that_does_not_read_delays_only_its_own_request(
    small_cluster: ScriptedCluster,
) -> None:
    """The router keeps few tokens for a client, so a slow one's response does not accumulate in its memory."""
    stream = DeltaStream([object()], lambda _: None)  # type: ignore[list-item] # the journal is never used
    reads, received = asyncio.Event(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        await reads.wait()
        received.extend(deltas)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(stream.write_to(write))
        await asyncio.sleep(0)
        pushing = group.create_task(_push_all(stream))
        assert (await small_cluster.complete(max_tokens=10))[0] == 200
        assert not pushing.done()
        reads.set()
    assert [delta.text for delta in received] == list(ascii_letters)


async def _push_all(stream: DeltaStream) -> None:
    for text in ascii_letters:
        stream.push([ChoiceDelta(choice_index=0, text=text)])
        await stream.wait_for_room()
    stream.end()


async def test_metrics_count_requests_tokens_and_times(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.cached_tokens = 4

    async def is_first_token_known() -> bool:
        return "first_token" in (await small_cluster.only_trace())["phases"]

    async def until_first_token(_: Context) -> None:
        await eventually(is_first_token_known)

    small_cluster.script.fail("decode_token", until_first_token)
    await small_cluster.complete()
    await small_cluster.stream(max_tokens=5)
    async with small_cluster.http.get(f"{small_cluster.base_url}/metrics") as response:
        exposition = await response.text()
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_success",
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens",
        "generation_tokens",
        "admission_rejections",
        "request_retries",
        "prefill_fallbacks",
    ):
        assert f"# TYPE pdserve_{name}" in exposition
    assert await small_cluster.metric("request_success_total", finished_reason="stop") == 1
    assert await small_cluster.metric("request_success_total", finished_reason="length") == 1
    assert await small_cluster.metric("prompt_tokens_total") == 18
    assert await small_cluster.metric("prompt_tokens_cached_total") == 8
    assert await small_cluster.metric("generation_tokens_total") == 18
    assert await small_cluster.metric("time_to_first_token_seconds_count") == 2
    # One gap between two messages. Tokens that overtake the first one share its message.
    assert 0 < await small_cluster.metric("inter_token_latency_seconds_count") <= 16
    assert await small_cluster.metric("prefills_total", tier="prefill") == 2


async def test_a_finished_request_logs_one_line_without_its_prompt(
    small_cluster: ScriptedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="router_svc")
    await small_cluster.complete(prompt="a secret of mine")
    [ended] = [record for record in caplog.records if record.getMessage() == "request_ended"]
    fields = vars(ended)["fields"]
    assert fields["state"] == "finished"
    assert {"admitted_s", "reserved_s", "first_token_s", "finish_s"} <= set(fields)
    assert "secret" not in "".join(str(vars(record)) for record in caplog.records)


# The process


async def run_router(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router_svc", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_process_serves_until_sigterm(redis_server: PrivateRedis, model_dir: Path, tmp_path: Path) -> None:
    flags = ("--model", str(model_dir), "--redis-url", redis_server.url, "--port", "0", "--grpc-port", "0")
    process = await run_router(*flags, "--audit-log", str(tmp_path / "audit.log"))
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while b"router_listening" not in (line := await process.stderr.readline()):
            assert line
        address = dict(field.split("=", 1) for field in line.decode().split() if "=" in field)["http"]
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/readyz") as response:
            assert response.status == 503
            assert "no decode worker" in (await response.json())["reason"]
        # Sent by programs that rotate logs: no reason to end.
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, rest = await process.communicate()
    assert process.returncode == 0, rest.decode()
    assert b"router_draining" in rest
    assert b"Traceback" not in rest
    written = [json.loads(line) for line in read(tmp_path / "audit.log")]
    assert [line["event"] for line in written] == ["stop_requested", "drain_started", "drain_ended"]
    assert written[0]["signal"] == "SIGTERM"


def read(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere", "--redis-url", "redis://localhost:1"], "error: "),
        (["--redis-url", "redis://localhost:1"], "error: --model is required"),
        (["--model", "MODEL", "--redis-url", "nonsense"], "error: The Redis URL"),
        (["--model", "MODEL", "--redis-url", "redis://localhost:1", "--port", "99999"], "error: Cannot listen"),
    ],
)
async def test_an_error_at_start_is_one_line(model_dir: Path, flags: list[str], words: str) -> None:
    process = await run_router(*[str(model_dir) if flag == "MODEL" else flag for flag in flags])
    async with asyncio.timeout(DEADLINE_S):
        _, error = await process.communicate()
    assert process.returncode == 1
    assert error.decode().splitlines()[-1].startswith(words)
    assert "Traceback" not in error.decode()
