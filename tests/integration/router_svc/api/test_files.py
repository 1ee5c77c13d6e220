"""/v1/files with OpenAI's client, on both kinds of store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.files import stored_files
from tests.integration.router_svc.api.test_reference import description_of
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.support.lazily import openai
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import END, tokens_of

MEBIBYTE = 1 << 20


#: Where the kind of store makes no difference.
ONE = pytest.mark.parametrize("kind", ["redis"])


@pytest.fixture(params=["redis", "directory"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@asynccontextmanager
async def _opened(redis: PrivateRedis, model_dir: Path, **settings: Any) -> AsyncIterator[ScriptedCluster]:
    async with in_own_task(open_cluster(redis, model_dir, {"decode-0": "decode"}, **settings)) as cluster:
        yield cluster


@pytest.fixture
async def stored(redis_server: PrivateRedis, model_dir: Path, state_url: str) -> AsyncIterator[ScriptedCluster]:
    async with _opened(redis_server, model_dir, state_url=state_url, max_file=4 * MEBIBYTE) as cluster:
        yield cluster


async def test_a_file_comes_back_as_it_was_sent_until_it_is_deleted(stored: ScriptedCluster) -> None:
    content = os.urandom(2 * MEBIBYTE + 12345)
    async with stored.client() as client:
        file = await client.files.create(file=("täglich.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(content),
            "täglich.jsonl",
            "batch",
            "processed",
        )
        assert file.expires_at == file.created_at + 30 * 86_400
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        assert (await client.files.delete(file.id)).deleted
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)
        assert (await client.files.list()).data == []
    # Nothing of its content is left.
    assert await _num_chunks(stored) == 0


async def _num_chunks(cluster: ScriptedCluster) -> int:
    """Chunks that the store has of any file."""
    state: Any = cluster.router._files.state  # type: ignore[union-attr]
    if hasattr(state, "_directory"):
        return len([*state._directory.glob("*-chunks:*")])
    return len(await state._store.call("KEYS", state._record_key("*-chunks:*")))


@ONE
async def test_answers_are_as_described(stored: ScriptedCluster) -> None:
    described = await description_of(stored.base_url)
    form = aiohttp.FormData(default_to_multipart=True)
    form.add_field("purpose", "batch")
    form.add_field("file", b"x", filename="a")
    async with stored.http.post(f"{stored.base_url}/v1/files", data=form) as response:
        described.check(("POST", "/v1/files"), response.status, response.headers, await response.read())
        file_id = (await response.json())["id"]
    for method, path in (("GET", ""), ("GET", "/{id}"), ("GET", "/{id}/content"), ("DELETE", "/{id}")):
        url = f"{stored.base_url}/v1/files{path}".replace("{id}", file_id)
        async with stored.http.request(method, url) as response:
            assert response.status == 200
            described.check((method, f"/v1/files{path}"), 200, response.headers, await response.read())


async def test_files_are_listed_in_pages(stored: ScriptedCluster) -> None:
    async with stored.client() as client:
        made = [(await client.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch")).id for n in range(3)]
        latest = [file.id async for file in client.files.list(limit=2)]
        assert sorted(latest) == sorted(made)
        assert [file.id async for file in client.files.list(limit=1, order="asc")] == latest[::-1]
        assert (await client.files.list(purpose="batch_output")).data == []
        page = await client.files.list(limit=2)
        assert page.has_more
        assert [file.id for file in (await client.files.list(after=latest[1])).data] == latest[2:]
        for wrong in ({"limit": 0}, {"order": "up"}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError):
                await client.files.list(**wrong)  # type: ignore[arg-type]


@ONE
async def test_a_file_that_is_refused_leaves_nothing(stored: ScriptedCluster) -> None:
    async with stored.client() as client:
        with pytest.raises(openai.APIStatusError, match="--max-file") as error:
            await client.files.create(file=("big", bytes(4 * MEBIBYTE + 1)), purpose="batch")
        assert error.value.status_code == 413
        big = ("big", bytes(2 * MEBIBYTE))
        with pytest.raises(openai.BadRequestError, match="'fine-tune', but must be 'batch'"):
            await client.files.create(file=big, purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await client.files.create(
                file=big, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            )
        with pytest.raises(openai.BadRequestError, match="empty"):
            await client.files.create(file=("none", b""), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="not that of a file"):
            await client.files.retrieve("../x")
        assert (await client.files.list()).data == []
    assert await _num_chunks(stored) == 0


#: Requests that are refused, with their status.
REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"json": {"purpose": "batch"}}, 415),
    ({"data": b"--x--\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400),
    ({"data": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400),
    ({"data": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400),
    ({"data": {"purpose": "batch", "file": "x"}, "headers": {"Origin": "https://evil.example"}}, 403),
]


@ONE
async def test_other_forms_are_refused(stored: ScriptedCluster) -> None:
    for options, status in REFUSED:
        sent = {"headers": {}, **options}
        if isinstance(options.get("data"), dict):
            sent["data"] = aiohttp.FormData(default_to_multipart=True)
            for name, value in options["data"].items():
                sent["data"].add_field(name, value)
        found, body = await stored.post("/v1/files", **sent)
        assert found == status, body


@ONE
async def test_a_client_that_leaves_during_its_upload_leaves_nothing(stored: ScriptedCluster) -> None:
    host, _, port = stored.base_url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(2 * MEBIBYTE)
    )

    async def has_chunks() -> bool:
        return await _num_chunks(stored) > 0

    async def has_none() -> bool:
        return await _num_chunks(stored) == 0

    await eventually(has_chunks)
    writer.close()
    await eventually(has_none)
    async with stored.client() as client:
        assert (await client.files.list()).data == []


async def test_a_tenant_has_its_own_files_and_not_too_many(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "MAX_FILES", 2)
    keys = tmp_path / "keys.json"
    entries = [{"id": n, "tenant": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in ("a", "b")]
    keys.write_text(json.dumps({"keys": entries}))
    settings = {"state_url": redis_server.url, "api_keys_file": str(keys)}
    async with _opened(redis_server, model_dir, **settings) as cluster:
        a, b = (openai.AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=n, max_retries=0) for n in "ab")
        async with a, b:
            file = await a.files.create(file=("a", b"x"), purpose="batch")
            for ask in (b.files.retrieve, b.files.content, b.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(file.id)
            assert (await b.files.list()).data == []
            await a.files.create(file=("a", b"x"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="Delete some"):
                await a.files.create(file=("a", b"x"), purpose="batch")
            await b.files.create(file=("b", b"x"), purpose="batch")


async def test_without_a_store_there_are_no_files(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with _opened(redis_server, model_dir) as cluster, cluster.client() as client:
        with pytest.raises(openai.NotFoundError, match="--state-url"):
            await client.files.list()
        with pytest.raises(openai.NotFoundError, match="--state-url"):
            await client.files.create(file=("a", b"x"), purpose="batch")


async def test_while_the_store_is_away_files_alone_answer_503(
    redis_server: PrivateRedis, model_dir: Path, tmp_path: Path
) -> None:
    gone = f"unix://{tmp_path / 'nothing.sock'}"
    async with _opened(redis_server, model_dir, state_url=gone) as cluster, cluster.client() as client:
        with pytest.raises(openai.InternalServerError) as error:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert error.value.status_code == 503
        body = {"input_file_id": "file-" + "0" * 32, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await cluster.post("/v1/batches", body))[0] == 503
        assert (await cluster.get("/v1/batches"))[0] == 503
        cluster.script.replies = [[*tokens_of("Hi."), END]]
        assert (await cluster.complete())[0] == 200
