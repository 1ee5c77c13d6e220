"""Errors that other workers would repeat, and workers that hold less than a request needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import LayoutMismatch, PdserveError, PeerRefused, RequestError
from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH, TEXT, after_first_token
from tests.integration.router_svc.script import Context, failing, vanish
from tests.support.redis import until
from tests.support.tiny_model import NAME

STRANGER = PeerRefused("The decode start is refused. It carries no MAC.")
TOO_LONG = RequestError("The prompt and max_tokens are 59 tokens, but the context holds 32.")


def _decode_workers(record: dict[str, Any]) -> list[str]:
    return [each["worker"] for each in record["decisions"] if each["tier"] == "decode"]


async def _error_of_stream(cluster: ScriptedCluster) -> dict[str, Any]:
    """The last event of a stream that has started, which is an error."""
    body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50, "stream": True}
    async with cluster.http.post(f"{cluster.base_url}/v1/completions", json=body) as response:
        assert response.status == 200
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    error: dict[str, Any] = json.loads(lines[-1].removeprefix(b"data: "))["error"]
    return error


@pytest.mark.parametrize(
    ("error", "max_starts"),
    [(STRANGER, 20), (LayoutMismatch("KV layouts differ."), 2)],
    ids=["refused as a stranger's", "other blocks"],
)
async def test_an_error_of_every_worker_ends_the_request_with_502(
    cluster: ScriptedCluster, error: PdserveError, max_starts: int
) -> None:
    """Fails when it counts as a failed transfer: the request was tried again until its deadline, an hour later."""
    cluster.script.fail("decode", *[failing(error)] * 99)
    status, body = await cluster.complete()
    assert status == 502
    assert str(error) in body["error"]["message"]
    assert len(cluster.calls.decode_starts) <= max_starts


async def test_workers_that_have_restarted_may_refuse_a_request_once(cluster: ScriptedCluster) -> None:
    """Each as its former incarnation, of which the router has not learned yet."""
    cluster.script.fail("decode", failing(STRANGER), failing(STRANGER))
    assert (await cluster.stream())[0] == TEXT
    assert [retry["reason"] for retry in (await cluster.only_trace())["retries"]] == ["peer_refused"] * 2


async def test_a_stream_does_not_go_on_where_it_would_be_cut_off(redis_server: PrivateRedis, model_dir: Path) -> None:
    """Fails when candidates are not asked for their context: the answer ended early with `length`, or with 400."""
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, worker_return_timeout_s=0.0) as cluster:
        used = list[str]()

        async def lose_it_for_a_shorter_one(context: Context) -> None:
            used.extend(_decode_workers(await cluster.only_trace()))
            [other] = {"decode-0", "decode-1"} - {*used}
            cluster.workers[other].set(max_model_len=32)
            known = cluster.router.cluster
            await until(known.directory, lambda: 32 in [worker.max_model_len for worker in known.ready("decode")])
            await vanish(context)

        cluster.script.fail("decode_token", None, after_first_token(cluster, lose_it_for_a_shorter_one))
        error = await _error_of_stream(cluster)
        assert _decode_workers(await cluster.only_trace()) == used
        assert "are ready hold 32 at most" in error["message"]


async def test_what_a_worker_refuses_to_go_on_with_is_no_error_of_the_client(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode", None, failing(TOO_LONG))
    cluster.script.fail("decode_token", None, after_first_token(cluster, vanish))
    assert (await cluster.stream())[0] == TEXT


async def test_what_two_workers_refuse_to_go_on_with_ends_the_stream_with_an_error_of_the_server(
    cluster: ScriptedCluster,
) -> None:
    cluster.script.fail("decode", None, *[failing(TOO_LONG)] * 2)
    cluster.script.fail("decode_token", None, after_first_token(cluster, vanish))
    error = await _error_of_stream(cluster)
    assert "refused to go on with the answer" in error["message"]
    assert error["type"] != "invalid_request_error"


async def test_what_the_last_worker_refuses_to_go_on_with_is_an_error_of_the_server(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """No other one is there or expected."""
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, worker_return_timeout_s=0.0) as cluster:

        async def refuse(context: Context) -> None:
            await failing(TOO_LONG)(context)

        cluster.script.fail("decode_token", None, after_first_token(cluster, refuse))
        error = await _error_of_stream(cluster)
        assert "refused to go on with the answer" in error["message"]
        assert error["type"] != "invalid_request_error"
