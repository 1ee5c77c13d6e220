"""ARCHITECTURE.md's walk through a request names the files through which a request really goes.

What a request waits for are coroutines; plain functions are read where they are called. Left out are the HTTP
middlewares, which every request passes, and connections and transports, which have interfaces.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pdserve.cli.private_redis import PrivateRedis
from tests.arch.documents import section
from tests.integration.router_svc.conftest import TWO_OF_EACH, open_cluster
from tests.integration.services.local_cluster import running_cluster
from tests.support.own_task import in_own_task
from tests.support.tiny_model import NAME, model_dir
from tests.support.walk import PACKAGES, files_entered
from tests.unit.model.tiny import save_model

__all__ = ["model_dir"]

#: Files whose coroutines a streamed chat passes, in all services.
MAX_FILES = 40
_LEFT_OUT = re.compile(
    r"pdserve/(base|net|redis|peers|observe)/.*|kvtransfer/transport/.*"
    r"|router_svc/api/(authentication|guards|http_app|request_span)\.py"
)
#: Adds a header to every response.
_SIGNALS = {"add_request_id", "add_limit_headers.<locals>.add", "add_ignored_fields.<locals>.add"}


async def _walk(request: Callable[[], Awaitable[object]]) -> set[str]:
    """The files that a request enters."""
    await request()  # So that connections are open, and what is loaded once is.
    entered = await files_entered(request())
    return {path for path, names in entered.items() if names - _SIGNALS and not _LEFT_OUT.fullmatch(path)}


async def test_the_walk_of_the_architecture_names_the_files_that_a_streamed_chat_enters(
    redis_server: PrivateRedis, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 50}
    async with in_own_task(open_cluster(redis_server, model_dir, TWO_OF_EACH)) as cluster:

        async def chat() -> None:
            async with cluster.http.post(f"{cluster.base_url}/v1/chat/completions", json=body) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")

        of_router = await _walk(chat)
    async with running_cluster(save_model(tmp_path_factory.mktemp("tiny"))) as workers:

        async def hand_over() -> None:
            request = workers.request([7 * position % 90 + 3 for position in range(45)], max_tokens=8)
            await request.start()
            await request.prefill(await request.ticket())
            await request.finish()

        of_workers = await _walk(hand_over)
    names = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/.-]*\.\w+)", section("ARCHITECTURE.md", "A request's life"))
    entered = of_router | of_workers
    assert entered - set(names) == set()
    assert len(entered) <= MAX_FILES
    # It follows one request from the router's endpoint to its last token.
    assert {"router_svc/api/responder.py", "decode_svc/session.py", "prefill_svc/pusher.py"} <= entered
