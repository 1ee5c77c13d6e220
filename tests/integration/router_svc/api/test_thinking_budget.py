"""Budgets for thinking, from each endpoint's field to what workers get, and where a model has nothing to bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.base.sampling import ThinkingBudget
from pdserve.base.wire import sampling_from_wire
from pdserve.cli.private_redis import PrivateRedis
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.router_svc.api.conftest import TEMPLATE
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.support.redis import until
from tests.support.tiny_model import END, NAME, tokens_of, write_model

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CLOSING = "</think>"
USER = {"role": "user", "content": "Hi"}
#: A path, the fields of a request with a budget of 7, and the name of the field in errors.
FORMS: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"messages": [USER], "thinking_token_budget": 7}),
    (RESPONSES, {"input": "Hi", "thinking_token_budget": 7}),
    (MESSAGES, {"messages": [USER], "max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 7}}),
]


def _sent(cluster: ScriptedCluster) -> ThinkingBudget | None:
    prefill, decode = cluster.calls.prefills[-1].sampling, cluster.calls.decode_starts[-1].sampling
    assert sampling_from_wire(prefill) == sampling_from_wire(decode)
    return sampling_from_wire(decode).thinking


async def _post(cluster: ScriptedCluster, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    """Status, answer, and names of the fields that were ignored."""
    cluster.script.replies = [[*tokens_of(f"<think>\nHm.{CLOSING}Hello."), END]]
    async with cluster.http.post(f"{cluster.base_url}{path}", json={"model": NAME, **fields}) as response:
        return response.status, await response.json(), response.headers.get("Pdserve-Ignored-Fields", "")


async def test_workers_of_both_tiers_get_the_budget_with_the_texts_of_the_form(thinker: ScriptedCluster) -> None:
    for path, fields in FORMS:
        assert (await _post(thinker, path, fields))[::2] == (200, "")
        assert _sent(thinker) == ThinkingBudget(
            max_tokens=7,
            is_open=False,
            opening="<think>",
            closings=(CLOSING,),
            closing_token_ids=tuple(tokens_of(CLOSING)),
        )


async def test_the_prompt_decides_whether_thinking_is_open(thinker: ScriptedCluster) -> None:
    chat = FORMS[0][1]
    for more, is_open in (
        ({"chat_template_kwargs": {"opens": True}}, True),
        ({"chat_template_kwargs": {"opens": True}, "response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"reasoning_effort": "none"}, False),
    ):
        assert (await _post(thinker, CHATS, chat | more))[0] == 200
        sent = _sent(thinker)
        assert sent is not None
        assert sent.is_open is is_open
    # A grammar has no thinking behind a prompt that has closed it.
    closed = {"reasoning_effort": "none", "response_format": {"type": "json_object"}}
    assert (await _post(thinker, CHATS, chat | closed))[0] == 200
    assert _sent(thinker) is None


async def test_any_number_is_no_budget(thinker: ScriptedCluster) -> None:
    for number, expected in ((-1, None), (None, None), (0, 0), (2**31 - 1, 2**31 - 1)):
        assert (await _post(thinker, CHATS, FORMS[0][1] | {"thinking_token_budget": number}))[0] == 200
        sent = _sent(thinker)
        assert (None if sent is None else sent.max_tokens) == expected


async def test_a_prompt_over_grpc_has_the_same_field(thinker: ScriptedCluster) -> None:
    async with grpc.aio.insecure_channel(thinker.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def generate(text: str, **fields: Any) -> None:
            thinker.script.replies = [[*tokens_of("Hello."), END]]
            sampling = pb.ClientSampling(max_tokens=20, thinking_token_budget=7)
            request = pb.GenerateRequest(model=NAME, text=text, sampling=sampling, **fields)
            async for _ in stub.Generate(request, timeout=20):
                pass

        for text, is_open in (("Hi", False), ("<|im_start|>assistant\n<think>\nWell", True)):
            await generate(text)
            sent = _sent(thinker)
            assert sent is not None
            assert (sent.max_tokens, sent.is_open) == (7, is_open)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be combined with structured output") as refused:
            await generate("Hi", structured_output=pb.StructuredOutput(regex="a+"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("older", [{"sampling_version": 2}, {"reads_grammars": False}])
async def test_workers_that_do_not_know_budgets_or_no_text_get_no_such_request(
    redis_server: PrivateRedis, tmp_path: Path, older: dict[str, Any]
) -> None:
    directory = write_model(tmp_path / NAME)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    async with open_cluster(redis_server, directory, {"decode-0": "decode"}, worker_return_timeout_s=0) as cluster:
        cluster.workers["decode-0"].set(**older)
        known = cluster.router.cluster
        [(name, value)] = older.items()
        await until(known.directory, lambda: all(getattr(each, name) == value for each in known.ready("decode")))
        status, answer, _ = await _post(cluster, *FORMS[0])
        assert status == 503
        assert "Update the workers" in answer["error"]["message"]
        assert (await _post(cluster, CHATS, {"messages": [USER]}))[0] == 200


async def test_a_model_without_thinking_refuses_it_or_says_that_it_ignores_it(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH) as cluster:
        for path, fields in FORMS[:2]:
            status, answer, _ = await _post(cluster, path, fields)
            assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
            assert "think block" in answer["error"]["message"]
        status, _, ignored = await _post(cluster, *FORMS[2])
        assert (status, ignored) == (200, "thinking.budget_tokens")
        assert _sent(cluster) is None
        too_long = FORMS[2][1] | {"messages": [USER | {"content": "Hi" * 300}]}
        status, _, ignored = await _post(cluster, MESSAGES, too_long)
        assert (status, ignored) == (400, "thinking.budget_tokens")
