"""Streams that go on at another router: the same bytes, for their owner, charged once, one router at a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.base.errors import PdserveError
from pdserve.base.layout import KvLayout
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from router_svc.records import stream_log
from tests.integration.router_svc.request.two_routers import (
    TEXT,
    Pair,
    by_choice,
    cut,
    events_of,
    normal,
    post,
    resume,
    start_of,
    two_routers,
)
from tests.integration.router_svc.script import failing
from tests.support.depth import IS_FULL
from tests.support.own_task import in_own_task
from tests.support.redis import eventually
from tests.support.tiny_model import NAME, tokens_of


@pytest.fixture
async def routers(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[Pair]:
    async with in_own_task(two_routers(redis_server, model_dir)) as pair:
        yield pair


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Say hello"}),
    ("/v1/completions", {"prompt": "Say hello", "logprobs": 2, "stop": ["is it"]}),
    ("/v1/completions", {"prompt": ["Say hello"], "echo": True, "n": 2, "seed": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "stop": ["rld, q"]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "n": 3,
            "seed": 5,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/completions",
        {"prompt": "Say hello", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    ("/v1/completions", {"prompt": "Say hello", "return_token_ids": True, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "return_token_ids": True}),
]


#: Each takes a third of a second of processor time. `make test` runs those that find the most.
full = pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=full-depth` runs it")
_QUICK = ((4, 9), (2, 1), (5, 1), (7, 9), (8, 1))


@pytest.mark.parametrize(
    ("path", "fields", "num_events"),
    [
        pytest.param(*body, num_events, marks=() if (number, num_events) in _QUICK else full)
        for number, body in enumerate(BODIES)
        for num_events in (1, 9)
    ],
)
async def test_the_joined_stream_is_that_of_an_undisturbed_run(
    routers: Pair, path: str, fields: dict[str, Any], num_events: int
) -> None:
    routers.first.script.cached_tokens = 3
    body = {"model": NAME, "max_tokens": 40, "stream": True} | fields
    undisturbed = await post(routers.first, path, body)
    start = await cut(routers, path, body, num_events, **{"X-Request-Id": "a-stream"})
    routers.first.script.cached_tokens = 7
    status, rest = await resume(routers.second, "a-stream", events_of(start)[-1][0])
    assert status == 200, rest
    assert by_choice(start + rest) == by_choice(undisturbed)
    heads = [re.match(rb'\{"id":"[^"]+","object":"[^"]+","created":\d+', each) for _, each in events_of(start + rest)]
    assert len({head[0] for head in heads if head is not None}) == 1, "one id and one time"
    # Once more, from the start and from every event: now no worker has a part in it.
    starts = len(routers.first.calls.decode_starts)
    status, whole = await resume(routers.second, "a-stream")
    assert status == 200
    events = events_of(start + rest)
    # The first ones may have come before the stream could be resumed, and then have no id.
    assert [
        (name if had else "", data) for (name, data), (had, _) in zip(events_of(whole), events, strict=True)
    ] == events
    events = events_of(whole)
    for index in (0, len(events) // 2, len(events) - 2):
        status, rest = await resume(routers.first, "a-stream", events[index][0])
        assert events_of(rest) == events[index + 1 :]
    assert await resume(routers.second, "a-stream", events[-1][0]) == (200, b"")
    assert len(routers.first.calls.decode_starts) == starts


async def test_a_message_of_anthropics_form_goes_on_in_it(routers: Pair) -> None:
    body = {"model": NAME, "max_tokens": 40, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    undisturbed = await post(routers.first, "/v1/messages", body)
    start = await cut(routers, "/v1/messages", body, 9, **{"X-Request-Id": "a-stream"})
    last = start_of(start)[-1][0]
    status, rest = await resume(routers.second, "msg_a-stream", last)
    assert status == 200, rest
    _, all_of_it = await resume(routers.second, "a-stream")
    assert all_of_it.endswith(b"\n\n" + rest)
    assert b"id: %b\n" % last.encode() in all_of_it.removesuffix(rest).split(b"\n\n")[-2] + b"\n"
    own = rb'id: [^\n]+\n|"id":"[^"]+"'
    assert re.sub(own, b"", all_of_it) == re.sub(own, b"", undisturbed)
    assert undisturbed.count(b"content_block_delta") > 20


async def test_events_are_tokens_however_workers_send_them(routers: Pair) -> None:
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello", "logprobs": 1}
    singly = await post(routers.first, "/v1/completions", body)
    routers.first.script.tokens_per_message = 3
    assert normal(await post(routers.first, "/v1/completions", body)) == normal(singly)


@full
async def test_a_tail_that_was_not_kept_is_made_again_and_what_was_kept_is_not(routers: Pair) -> None:
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    undisturbed = await post(routers.first, "/v1/completions", body)
    start = await cut(routers, "/v1/completions", body, 9, **{"X-Request-Id": "tail"})
    async with Store(routers.first.router.config.redis_url) as store:
        [key] = await store.call("KEYS", store.key("stream-output:*:tail"))  # type: ignore[misc]
        await store.call("LTRIM", key, 0, 0)
    before = len(routers.first.calls.decode_starts)
    status, rest = await resume(routers.second, "cmpl-tail", events_of(start)[-1][0])
    assert (status, normal(start + rest)) == (200, normal(undisturbed))
    [decode] = routers.first.calls.decode_starts[before:]
    assert [list(each.token_ids) for each in decode.output] in (
        [],
        [tokens_of(TEXT)[: len(decode.output[0].token_ids)]],
    )
    assert decode.ref.request_id != routers.first.calls.decode_starts[before - 1].ref.request_id


@full
async def test_an_answer_in_one_piece_is_resumed_as_a_stream(routers: Pair) -> None:
    body = {"model": NAME, "max_tokens": 40, "prompt": "Say hello", "stream": False}
    await post(routers.first, "/v1/completions", body, **{"X-Request-Id": "whole"})
    status, data = await resume(routers.second, "whole")
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert (status, normal(data)) == (200, normal(await post(routers.first, "/v1/completions", body | streamed)))


async def test_the_router_that_ran_it_stops_when_the_stream_is_resumed_elsewhere(routers: Pair) -> None:
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    routers.first.script.pace = pace = asyncio.Semaphore(4)
    headers = {"X-Request-Id": "moved"}
    async with routers.first.http.post(f"{routers.first.base_url}/v1/completions", json=body, headers=headers) as old:
        await old.content.readany()

        async def is_kept() -> bool:
            return await routers.kept() > 0

        await eventually(is_kept)
        resumed = asyncio.create_task(resume(routers.second, "moved"))
        last = (await old.read()).split(b"\n\n")
        assert b"has resumed it" in last[-3]
        await routers.first.calls.until(lambda: routers.first.calls.num_open <= 2)
        for _ in range(50):
            pace.release()
        status, data = await resumed
    assert (status, events_of(data)[-1][1]) == (200, b"[DONE]")
    assert routers.first.router._resuming.logs.taken == 1
    assert routers.second.router._resuming.logs.resumed == 1


async def test_a_grpc_stream_goes_on_behind_its_last_position(routers: Pair) -> None:
    """With the same tokens, texts and usage; in its own API alone."""
    sampling = pb.ClientSampling(max_tokens=40, logprobs=1, n=2, seed=3)
    request = pb.GenerateRequest(
        model=NAME, text="Say hello", sampling=sampling, request_id="by-grpc", return_token_ids=True
    )
    routers.first.script.pace = pace = asyncio.Semaphore(0)
    got: list[pb.GenerateResponse] = []
    async with routers.first.channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        for _ in range(4):
            got.append(await call.read())  # type: ignore[attr-defined]
            pace.release()
        call.cancel()
    await routers.first.calls.until(lambda: routers.first.calls.num_open == 0)
    routers.first.script.pace = None
    assert (await resume(routers.second, "by-grpc"))[0] == 404, "not over HTTP"
    async with routers.second.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def resumed(request_id: str, position: str) -> list[pb.GenerateResponse]:
            call = stub.Resume(pb.ResumeRequest(request_id=request_id, position=position))
            return [message async for message in call]

        rest = await resumed("by-grpc", got[-1].position)
        undisturbed = [message async for message in stub.Generate(request)]
        assert shown([*got, *rest]) == shown(undisturbed)
        assert await resumed("gen-by-grpc", undisturbed[-1].position) == []
        again = await resumed("by-grpc", "")
        assert shown(again) == shown(undisturbed)
        assert [len(each.prompt_token_ids) for each in (again[0], *rest)] == [9, *([0] * len(rest))]
        for request_id, position, code in (
            ("never-was", "", grpc.StatusCode.NOT_FOUND),
            ("by-grpc", "00000000-1x2", grpc.StatusCode.NOT_FOUND),
            ("by-grpc", "x", grpc.StatusCode.INVALID_ARGUMENT),
            ("by grpc", "", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await resumed(request_id, position)
            assert refused.value.code() == code


def shown(messages: list[pb.GenerateResponse]) -> tuple[dict[int, list[pb.GenerateChoice]], list[pb.Usage]]:
    """The choices of a stream, each with its messages, and its usage."""
    choices: dict[int, list[pb.GenerateChoice]] = {}
    for message in messages:
        for choice in message.choices:
            choices.setdefault(choice.choice_index, []).append(choice)
    return choices, [message.usage for message in messages if message.HasField("usage")]


@full
@pytest.mark.parametrize("name", ["unknown", "chatcmpl-unknown", "a" * 128])
async def test_what_is_not_there_is_not_found(routers: Pair, name: str) -> None:
    status, body = await resume(routers.second, name)
    assert status == 404
    assert b"no stream of this id" in body


@full
async def test_an_id_of_an_earlier_stream_of_that_name_is_not_found(routers: Pair) -> None:
    routers.first.script.replies = [[5, 6, 7]]
    body = {"model": NAME, "max_tokens": 3, "stream": True, "prompt": "Say hello", "logprobs": 1}
    await post(routers.first, "/v1/completions", body, **{"X-Request-Id": "good"})
    assert (await resume(routers.second, "good"))[0] == 200
    # An id of the stream before, which had the same request id.
    assert (await resume(routers.second, "good", "00000000-1"))[0] == 404


@full
async def test_ids_that_are_none_are_refused(routers: Pair) -> None:
    for last in ("1", "x" * 4000):
        status, body = await resume(routers.second, "any", last)
        assert status == 400, body
        assert b"Last-Event-ID" in body
    assert (await resume(routers.second, "no%20id"))[0] == 400


@full
async def test_streams_have_no_ids_unless_it_is_switched_on(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with in_own_task(two_routers(redis_server, model_dir, resume_timeout_s=0.0)) as pair:
        body = {"model": NAME, "max_tokens": 5, "stream": True, "prompt": "Say hello"}
        data = await post(pair.first, "/v1/completions", body, **{"X-Request-Id": "off"})
        assert b"id: " not in data.replace(b'"id": ', b"")
        assert (await resume(pair.first, "off"))[0] == 404
        assert await pair.kept() == 0


@pytest.mark.own_redis
async def test_without_redis_the_stream_goes_on(routers: Pair, redis_server: PrivateRedis) -> None:
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    undisturbed = await post(routers.first, "/v1/completions", body)
    routers.first.script.pace = pace = asyncio.Semaphore(3)
    async with routers.first.http.post(f"{routers.first.base_url}/v1/completions", json=body) as response:
        data = await response.content.readany()
        await redis_server.stop()
        for _ in range(50):
            pace.release()
        data += await response.read()
    assert normal(data) == normal(undisturbed)


@pytest.mark.own_redis
async def test_events_have_no_ids_until_redis_has_the_stream(routers: Pair, redis_server: PrivateRedis) -> None:
    """A client whose last event has none must not rely on its stream when the router is lost."""
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    undisturbed = await post(routers.first, "/v1/completions", body)
    routers.first.script.pace = pace = asyncio.Semaphore(3)
    await redis_server.stop()
    headers = {"X-Request-Id": "late"}
    url = f"{routers.first.base_url}/v1/completions"
    async with routers.first.http.post(url, json=body, headers=headers) as response:
        data = await response.content.readany()
        assert b"data: " in data
        assert b"\nid: " not in b"\n" + data
        await redis_server.start()
        async with Store(routers.first.router.config.redis_url) as store:
            await eventually(lambda: exists(store, "stream:*:late"))
        for _ in range(50):
            pace.release()
        data += await response.read()
    assert normal(data) == normal(undisturbed)
    assert b"\nid: " in data


@full
async def test_a_stream_that_redis_has_lost_is_written_again_and_made_again(routers: Pair) -> None:
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    undisturbed = await post(routers.first, "/v1/completions", body)
    routers.first.script.pace = pace = asyncio.Semaphore(3)
    headers = {"X-Request-Id": "flushed"}
    async with (
        Store(routers.first.router.config.redis_url) as store,
        routers.first.http.post(f"{routers.first.base_url}/v1/completions", json=body, headers=headers) as response,
    ):
        got = await response.content.readany()
        await eventually(lambda: exists(store, "stream-output:*:flushed"))
        await store.call("FLUSHALL")
        pace.release()
        await eventually(lambda: exists(store, "stream:*:flushed"))
        routers.lose()
    routers.first.script.pace = None
    assert routers.first.router._resuming.logs.lost == {"store": 1}
    await eventually(lambda: is_known(routers))
    status, rest = await resume(routers.second, "flushed", start_of(got)[-1][0])
    assert status == 200, rest
    whole = b"".join(b"id: %b\ndata: %b\n\n" % (name.encode(), data) for name, data in start_of(got)) + rest
    assert by_choice(whole) == by_choice(undisturbed)


async def exists(store: Store, pattern: str) -> bool:
    return bool(await store.call("KEYS", store.key(pattern)))


async def is_known(pair: Pair) -> bool:
    """Whether the workers are in the registry again."""
    return all(pair.second.router.cluster.ready(tier) for tier in ("prefill", "decode"))


@full
async def test_output_beyond_the_limit_is_not_kept_and_made_again(
    routers: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "MAX_OUTPUT_BYTES", 10)
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    data = await post(routers.first, "/v1/completions", body, **{"X-Request-Id": "long"})

    async def is_over() -> bool:
        return routers.first.router._resuming.logs.lost == {"too_large": 1}

    await eventually(is_over)
    starts = len(routers.first.calls.decode_starts)
    events = events_of(data)
    status, rest = await resume(routers.second, "long", events[7][0])
    assert (status, events_of(rest)) == (200, events[8:])
    assert len(routers.first.calls.decode_starts) == starts + 1


async def test_a_resumed_stream_waits_for_its_layout_and_can_be_resumed_again(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """Another layout may be another model. Fails if the layout of the lost router's worker is not kept."""
    async with in_own_task(two_routers(redis_server, model_dir, worker_return_timeout_s=0.3)) as pair:
        body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
        undisturbed = await post(pair.first, "/v1/completions", body)
        start = await cut(pair, "/v1/completions", body, 5, **{"X-Request-Id": "waits"})
        decode = pair.first.workers["decode-0"]
        before = decode.record.layout

        async def become(layout: KvLayout) -> None:
            decode.set(layout=layout)
            await eventually(lambda: is_known_with(pair, layout))

        await become(replace(before, model="another"))
        status, refused = await resume(pair.second, "waits", events_of(start)[-1][0])
        assert (status, b"No decode worker is ready" in refused) == (200, True), refused
        await become(before)
        status, rest = await resume(pair.second, "waits", events_of(start)[-1][0])
        assert (status, by_choice(start + rest)) == (200, by_choice(undisturbed))


async def is_known_with(pair: Pair, layout: KvLayout) -> bool:
    """Whether the second router knows that decode-0 has this layout."""
    return [worker.layout for worker in pair.second.router.cluster.ready("decode")] == [layout]


@full
async def test_a_request_that_failed_leaves_nothing_to_resume(routers: Pair) -> None:
    routers.first.script.fail("decode_token", *[failing(PdserveError("it broke again")) for _ in range(8)])
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    url, headers = f"{routers.first.base_url}/v1/completions", {"X-Request-Id": "broken"}
    async with routers.first.http.post(url, json=body, headers=headers) as response:
        # As an event, or before there was any.
        assert b"it broke again" in await response.read()
    assert (await resume(routers.second, "broken"))[0] == 404


@pytest.mark.parametrize("refusal", ["drains", "serves another model"])
async def test_a_resume_that_is_refused_leaves_the_stream_where_it_runs(routers: Pair, refusal: str) -> None:
    """Fails when the stream is taken before its new router knows that it can run it: nobody went on with it."""
    body = {"model": NAME, "max_tokens": 40, "stream": True, "prompt": "Say hello"}
    undisturbed = await post(routers.first, "/v1/completions", body)
    routers.first.script.pace = pace = asyncio.Semaphore(3)
    second = routers.second.router
    headers = {"X-Request-Id": "healthy"}
    async with (
        Store(routers.first.router.config.redis_url) as store,
        routers.first.http.post(f"{routers.first.base_url}/v1/completions", json=body, headers=headers) as response,
    ):
        data = await response.content.readany()
        await eventually(lambda: exists(store, "stream-output:*:healthy"))
        if refusal == "drains":
            second.models.first.requests.drain()
        else:
            resuming = second._resuming
            object.__setattr__(resuming, "revisions", {NAME: "another"})
        status, error = await resume(routers.second, "healthy")
        assert (status, b"error" in error) == (503 if refusal == "drains" else 409, True)
        for _ in range(50):
            pace.release()
        data += await response.read()
    assert normal(data) == normal(undisturbed)
    assert routers.first.router._resuming.logs.taken == 0
