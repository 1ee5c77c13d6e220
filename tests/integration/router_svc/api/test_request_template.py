"""Chat templates of requests: rendered where the router takes them, refused everywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.support.tiny_model import END, NAME, tokens_of

_TEMPLATE = "<<{% for each in messages %}{{ each.content }}|{% endfor %}{{ mood }}>>"
_OTHER = "{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
_CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"mood": "!"}}


def _prompt(cluster: ScriptedCluster) -> bytes:
    return bytes(token for token in cluster.calls.decode_starts[-1].prompt_token_ids if token < 256)


async def test_a_template_replaces_the_models_own_for_one_request(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, trust_request_chat_template=True) as cluster:

        async def ask(**fields: object) -> dict[str, object]:
            cluster.script.replies = [[*tokens_of("Hm.</think>Hello."), END]]
            status, answer = await cluster.post("/v1/chat/completions", _CHAT | fields)
            assert status == 200, answer
            message: dict[str, object] = answer["choices"][0]["message"]
            return message

        assert (await ask())["content"] == "Hm.</think>Hello."
        own = _prompt(cluster)
        for _ in range(2):  # From the second on, it is compiled already.
            assert (await ask(chat_template=_TEMPLATE))["content"] == "Hm.</think>Hello."
            assert _prompt(cluster) == b"<<Hi|!>>"
        # Whether there is thinking follows from the template. So does whether it can be bounded.
        message = await ask(chat_template=_OTHER, thinking_token_budget=5)
        assert (message["reasoning"], message["content"]) == ("Hm.", "Hello.")
        budget = cluster.calls.decode_starts[-1].sampling.thinking
        assert (budget.max_tokens, budget.is_open) == (5, True)
        assert (await ask(chat_template=None))["content"] == "Hm.</think>Hello."
        assert _prompt(cluster) == own
        status, counted = await cluster.post("/tokenize", _CHAT | {"chat_template": _TEMPLATE})
        assert (status, counted["tokens"]) == (200, tokens_of("<<Hi|!>>"))


async def test_a_template_that_is_wrong_is_400_with_its_line_and_harms_no_other_request(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, trust_request_chat_template=True) as cluster:
        for template, text in (
            ("\n{% if %}", "in line 2"),
            ("{{ 1 }}\n\n{{ messages[7].content }}", "in line 3"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{% for a in range(9 ** 9) %}{% for b in range(9 ** 9) %}{% endfor %}{% endfor %}", "in line 1"),
            ("x" * 65_537, "65536"),
        ):
            for path in ("/v1/chat/completions", "/tokenize"):
                status, answer = await cluster.post(path, _CHAT | {"chat_template": template})
                assert (status, answer["error"]["param"]) == (400, "chat_template")
                assert text in answer["error"]["message"]
            cluster.script.replies = [[*tokens_of("Hello."), END]]
            assert (await cluster.post("/v1/chat/completions", _CHAT))[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_router_takes_no_template_without_its_flag(
    redis_server: PrivateRedis, model_dir: Path, path: str
) -> None:
    async with open_cluster(redis_server, model_dir, {}) as cluster:
        status, answer = await cluster.post(path, _CHAT | {"chat_template": "{{ 1 }}"})
        assert (status, answer["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in answer["error"]["message"]
