"""Log-probabilities of prompts over HTTP: shapes, bounds, and what follows when a worker fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import Draining, NoFreeBlocks, PdserveError, RequestError
from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH, TEXT
from tests.integration.router_svc.script import Context, Fault, failing, hang, vanish
from tests.support.redis import until
from tests.support.tiny_model import NAME, tokens_of

ECHO: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}
#: Longer than a message of scores.
PROMPT = "Say é now"


def scores(prompt: str) -> list[float | None]:
    """What the scripted workers answer."""
    return [None, *(-float(token) for token in tokens_of(prompt)[1:])]


@pytest.mark.parametrize("prompt", [PROMPT, tokens_of(PROMPT)], ids=["text", "ids"])
async def test_the_lists_have_an_entry_for_each_token_of_the_prompt(cluster: ScriptedCluster, prompt: Any) -> None:
    status, body = await cluster.complete(prompt=prompt, **ECHO)
    assert status == 200
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (PROMPT, "length", None)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == scores(PROMPT)
    # The two bytes of the character start where it does.
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert logprobs["tokens"] == [*"Say ", "\ufffd", "\ufffd", *" now"]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"A": -0.25, "a": -97.0}
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 0,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    record = await cluster.only_trace()
    assert [(each["tier"], each["attempt"]) for each in record["decisions"]] == [("prefill", 1)]
    assert (record["state"], record["prefilled_by"]) == ("finished", "prefill")


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}, {"logprob_token_ids": [90, 66]}, {"return_token_ids": True}])
async def test_the_output_follows_the_prompt_streamed_or_not(cluster: ScriptedCluster, fields: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "ab"], "n": 2, **ECHO, "max_tokens": 5, **fields}
    _, whole = await cluster.complete(**body)
    _, events = await cluster.stream(**body)
    assert len(whole["choices"]) == 4
    for choice in whole["choices"]:
        index, prompt = choice["index"], (PROMPT, "ab")[choice["index"] // 2]
        assert choice["text"] == prompt + TEXT[:5]
        lists = choice["logprobs"]
        assert {len(each) for each in lists.values()} == {len(tokens_of(prompt)) + 5}
        assert lists["token_logprobs"][: len(tokens_of(prompt))] == scores(prompt)
        assert lists["text_offset"][len(tokens_of(prompt)) :] == [len(prompt) + at for at in range(5)]
        streamed = [each for event in events for each in event["choices"] if each["index"] == index]
        assert "".join(each["text"] for each in streamed) == choice["text"]
        for name, values in lists.items():
            assert [value for each in streamed if each["logprobs"] for value in each["logprobs"][name]] == values
        # The prompt and its scores are one event, and the first one.
        assert streamed[0]["logprobs"]["token_logprobs"] == scores(prompt)
        if "logprob_token_ids" in fields:
            assert set(lists["top_logprobs"][1]) == {"A", "Z", "B", lists["tokens"][1]}


async def test_an_echo_without_log_probabilities_and_tokens_needs_no_worker(cluster: ScriptedCluster) -> None:
    status, body = await cluster.complete(prompt=PROMPT, echo=True, max_tokens=0)
    assert (status, body["choices"][0]["text"], body["choices"][0]["logprobs"]) == (200, PROMPT, None)
    assert body["choices"][0]["finish_reason"] == "length"
    assert (await cluster.stream(prompt=PROMPT, echo=True, max_tokens=0))[0] == PROMPT
    assert not cluster.calls.prefills
    assert not cluster.calls.decode_starts


async def test_a_prompt_of_one_token_is_not_sent(cluster: ScriptedCluster) -> None:
    _, body = await cluster.complete(prompt="a", prompt_logprobs=2, **ECHO)
    [choice] = body["choices"]
    assert choice["logprobs"] == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    assert choice["prompt_logprobs"] == [None]
    assert not cluster.calls.prefills


async def test_prompt_logprobs_name_tokens_by_their_ids(cluster: ScriptedCluster) -> None:
    _, body = await cluster.complete(prompt="Sab", prompt_logprobs=2, logprobs=1, echo=True, max_tokens=1)
    [choice] = body["choices"]
    first, a, _ = choice["prompt_logprobs"]
    assert first is None
    assert a == {
        "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -0.5, "rank": 2, "decoded_token": "B"},
        "97": {"logprob": -97.0, "rank": 7, "decoded_token": "a"},
    }
    # The echo has as many as it was to have.
    assert choice["logprobs"]["top_logprobs"][1] == {"A": -0.25, "a": -97.0}
    messages = [{"role": "user", "content": "Sab"}]
    status, chat = await cluster.post(
        "/v1/chat/completions", {"model": NAME, "messages": messages, "prompt_logprobs": 0, "return_token_ids": True}
    )
    assert status == 200
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["prompt_logprobs"][0] is None
    assert [set(each) for each in chat["prompt_logprobs"][1:]] == [{str(each)} for each in chat["prompt_token_ids"][1:]]


async def test_what_cannot_be_scored_is_refused_by_name(cluster: ScriptedCluster) -> None:
    for fields, status, param in (
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, 400, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, 400, "min_tokens"),
        ({"prompt": ["a" * 200] * 40, "prompt_logprobs": 20}, 413, "prompt"),
        ({"prompt": "a" * 200, "n": 128, "logprobs": 5, "echo": True, "max_tokens": 1}, 413, "prompt"),
        ({"suffix": "x"}, 400, "suffix"),
    ):
        answer, body = await cluster.complete(**fields)
        assert (answer, body["error"]["param"]) == (status, param), (fields, body)
    assert not cluster.calls.prefills


@pytest.mark.parametrize("max_tokens", [0, 50])
@pytest.mark.parametrize("point", ["prefill", "prefill_scored"])
@pytest.mark.parametrize(
    "fault", [vanish, failing(Draining("it drains")), failing(NoFreeBlocks("full"))], ids=["lost", "drains", "full"]
)
async def test_another_worker_scores_what_one_did_not(
    cluster: ScriptedCluster, point: str, fault: Fault, max_tokens: int
) -> None:
    cluster.script.fail(point, None, fault) if point == "prefill_scored" else cluster.script.fail(point, fault)
    status, body = await cluster.complete(prompt=PROMPT, **{**ECHO, "max_tokens": max_tokens})
    assert status == 200, body
    assert body["choices"][0]["logprobs"]["token_logprobs"][:10] == scores(PROMPT)
    record = await cluster.only_trace()
    assert len(record["retries"]) == 1
    scoring = [each["worker"] for each in record["decisions"] if each["tier"] == "prefill"][:2]
    assert set(scoring) == {"prefill-0", "prefill-1"}
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_request_waits_for_another_worker_while_the_only_one_drains(cluster: ScriptedCluster) -> None:
    known = cluster.router.cluster
    cluster.workers["prefill-1"].set(ready=False)
    await until(known.directory, lambda: len(known.ready("prefill")) == 1)

    async def drain(_: Context) -> None:
        cluster.workers["prefill-1"].set(ready=True)
        raise Draining("it drains")

    cluster.script.fail("prefill", drain)
    status, body = await cluster.complete(prompt=PROMPT, **ECHO)
    assert status == 200, body
    assert body["choices"][0]["logprobs"]["token_logprobs"] == scores(PROMPT)


async def test_the_first_token_is_not_written_with_the_prompt(cluster: ScriptedCluster) -> None:
    released = asyncio.Event()

    async def wait(_: Context) -> None:
        await released.wait()

    cluster.script.fail("prefill", None, wait)
    body = {"model": NAME, "prompt": PROMPT, **ECHO, "max_tokens": 5, "stream": True}
    async with cluster.http.post(f"{cluster.base_url}/v1/completions", json=body) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first["choices"][0]["logprobs"]["token_logprobs"] == scores(PROMPT)
        record = await cluster.only_trace()
        assert "first_write" not in record["phases"]
        assert record["state"] in ("scoring", "reserved", "prefilling")
        released.set()
        await response.read()
    assert "first_write" in (await cluster.only_trace())["phases"]


async def test_errors_that_no_worker_would_spare_the_client_end_the_request(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill", failing(RequestError("it is wrong", param="prompt")))
    assert (await cluster.complete(prompt=PROMPT, **ECHO))[0] == 400
    cluster.script.fail("prefill", *[failing(PdserveError("it broke"))] * 2)
    status, body = await cluster.complete(prompt=PROMPT, **ECHO)
    assert (status, "it broke" in json.dumps(body)) == (500, True)
    assert not any(cluster.script.faults.values())


async def test_a_deadline_ends_a_request_that_is_scored(cluster: ScriptedCluster) -> None:
    """The call to the worker ends with it, which the cluster's own end checks."""
    cluster.script.fail("prefill_scored", hang)
    status, body = await cluster.complete(prompt=PROMPT, timeout=0.5, **ECHO)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    record = await cluster.only_trace()
    assert [each["tier"] for each in record["decisions"]] == ["prefill"]
    assert record["state"] == "failed"


async def test_tokens_of_prompts_that_are_scored_alone_are_counted(cluster: ScriptedCluster) -> None:
    before = await _prompt_tokens(cluster)
    assert (await cluster.complete(prompt=PROMPT, **ECHO))[0] == 200
    assert await _prompt_tokens(cluster) == before + 10
    assert (await cluster.complete(prompt=PROMPT, **{**ECHO, "max_tokens": 2}))[0] == 200
    assert await _prompt_tokens(cluster) == before + 20


async def _prompt_tokens(cluster: ScriptedCluster) -> float:
    async with cluster.http.get(f"{cluster.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith("pdserve_prompt_tokens_total")]
    return float(value)


async def test_cached_tokens_are_none_although_the_second_worker_finds_them(cluster: ScriptedCluster) -> None:
    cluster.script.cached_tokens = 8
    _, body = await cluster.complete(prompt=PROMPT, **{**ECHO, "max_tokens": 3})
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _, body = await cluster.complete(prompt=PROMPT, max_tokens=3)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


async def test_workers_that_do_not_score_get_no_such_request(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, worker_return_timeout_s=0.1) as cluster:
        cluster.workers["prefill-0"].set(sampling_version=1)
        known = cluster.router.cluster
        await until(known.directory, lambda: all(each.sampling_version == 1 for each in known.ready("prefill")))
        status, body = await cluster.complete(prompt=PROMPT, **ECHO)
        assert status == 503
        assert "prefill worker" in body["error"]["message"]
        assert not cluster.calls.prefills
        assert (await cluster.complete(prompt=PROMPT))[0] == 200
