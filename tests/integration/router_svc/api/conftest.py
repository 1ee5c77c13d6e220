"""A router of a model that thinks and calls tools, with scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.support.own_task import in_own_task
from tests.support.tiny_model import NAME, write_model

#: A chat template of the form of Hermes.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}{{ message.reasoning_content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture
async def thinker(redis_server: PrivateRedis, tmp_path: Path) -> AsyncIterator[ScriptedCluster]:
    """One router, one prefill and one decode worker."""
    directory = write_model(tmp_path / NAME)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    async with in_own_task(open_cluster(redis_server, directory, ONE_OF_EACH)) as opened:
        yield opened


@pytest.fixture
def kind() -> str:
    """The store of a router that stores: a Redis or a directory."""
    return "redis"


@pytest.fixture
def state_url(kind: str, redis_server: PrivateRedis, tmp_path: Path) -> str:
    """The URL of that store."""
    return redis_server.url if kind == "redis" else f"file:{tmp_path / 'state'}"
