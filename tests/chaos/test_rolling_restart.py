"""SIGTERM at every process in turn, routers included: clients whose router ends resume their streams at the other."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve.cli.router_client import get_model
from pdserve.cli.status import ClusterStatus
from tests.chaos.test_drain import restarted
from tests.chaos.test_router_lost import EVENT, FIELDS, body_of, by_choice, is_ready, path_of, start_router, whole
from tests.support.cluster import READY_S, Cluster, free_port, running_cluster
from tests.support.depth import IS_FULL

pytestmark = [
    pytest.mark.skipif(not IS_FULL, reason="takes minutes: `make test-all ARGS=chaos` runs it"),
    pytest.mark.timeout(600),
]

#: A router that ends lets responses go on for this long, and then for the 5 s that its HTTP server gives them.
DRAIN_TIMEOUT_S = 1.0
#: Longer than that, so that no stream which begins when its router is ended is complete before the router is gone.
MAX_TOKENS = 700
DONE = b"data: [DONE]\n\n"
WORKERS = ("decode-0", "prefill-0", "decode-1", "prefill-1")


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    """Two workers of each tier, and routers that keep streams."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "256MiB", "--prefill", "2", "--decode", "2")
    flags += ("--trust-request-chat-template",)
    flags += ("--drain-timeout-s", f"{DRAIN_TIMEOUT_S:g}")
    environment = {"PDSERVE_ROUTER__RESUME_TIMEOUT_S": "60"}
    with running_cluster(tmp_path_factory.mktemp("resumable"), *flags, model=model, **environment) as cluster:
        yield cluster


class Client:
    """Sends one request again and again. When its router ends, it goes on at the other one."""

    def __init__(self, http: aiohttp.ClientSession, body: dict[str, Any], urls: tuple[str, str]) -> None:
        """`urls`: of routers. It stays with the first until that one ends."""
        self._http = http
        self._body = body
        self._url, self._other_url = urls
        #: The stream under way in whole events, and the id of its request once a router has taken it.
        self._events: list[bytes] = []
        self._id = ""
        self.num_complete = 0
        #: How often a router went on with a stream of the other one, by its URL.
        self.resumed: Counter[str] = Counter()

    async def run(self, is_over: asyncio.Event, undisturbed: Any) -> None:
        """Until it is over. Each stream has to be the undisturbed one."""
        while not is_over.is_set():
            self._events, self._id = [], ""
            while not (self._events and self._events[-1].endswith(DONE)):
                if not await self._go_on():
                    self._url, self._other_url = self._other_url, self._url
            assert content_of(b"".join(self._events)) == undisturbed
            self.num_complete += 1

    @property
    def is_long(self) -> bool:
        """Whether its streams have all of their tokens."""
        return "stop" not in self._body

    def has_started_at(self, url: str) -> bool:
        """Whether the head of a stream has come from this router, and most of it is still to come."""
        return self._url == url and 0 < len(self._events) < MAX_TOKENS // 10

    async def _go_on(self) -> bool:
        """Takes what is behind the events that it has. False: its router has ended, or refuses because it does so."""
        ids = [match["id"] for match in map(EVENT.match, self._events) if match is not None]
        headers = {"Last-Event-ID": ids[-1].decode()} if ids else {}
        path = f"/v1/requests/{self._id}/stream" if self._id else path_of(self._body)
        method, body = ("GET", None) if self._id else ("POST", self._body)
        try:
            async with self._http.request(method, self._url + path, json=body, headers=headers) as response:
                if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    return False
                assert response.status == HTTPStatus.OK, await response.text()
                self.resumed[self._url] += bool(self._id)
                self._id = response.headers["X-Request-Id"]
                await self._read(response)
        except aiohttp.ClientError:
            return False
        return True

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for chunk in response.content.iter_any():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                assert b'"error"' not in event, event
                if not event.startswith(b":"):  # It says that the router is alive.
                    self._events.append(event + b"\n\n")


def content_of(data: bytes) -> tuple[dict[int, list[Any]], list[tuple[int, int]]]:
    """The events of each choice, and the tokens of the usage, without those that happened to be cached."""
    choices, usage = by_choice(data)
    return choices, [(each["prompt_tokens"], each["completion_tokens"]) for each in usage]


class SecondRouter:
    """A router beside that of `pdserve up`, and its supervisor."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._port = free_port()
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Returns when it is ready."""
        self._process = await start_router(self._cluster, self._directory, self._port)
        await self._cluster.until_async(lambda: is_ready(self.url), "the other router is ready", timeout_s=READY_S)

    async def stop(self) -> None:
        """Sends SIGTERM, and returns when it has ended by itself."""
        assert self._process is not None
        self._process.terminate()
        assert await self._process.wait() == 0


@asynccontextmanager
async def second_router(cluster: Cluster, directory: Path) -> AsyncIterator[SecondRouter]:
    router = SecondRouter(cluster, directory)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


async def restart_router(cluster: Cluster) -> None:
    """Sends SIGTERM to the router of `pdserve up`, and returns when the next one is ready."""
    ended = cluster.kill("router", signal.SIGTERM)

    def is_back() -> bool:
        router = cluster.processes().get("router")
        return router is not None and router != ended and is_ready(cluster.base_url)

    await cluster.until_async(is_back, "the router is back", timeout_s=READY_S)


async def test_a_rolling_restart_of_every_process_loses_no_token(resumable: Cluster, tmp_path: Path) -> None:
    """Streams run all the time. Fails when a token is lost, comes twice or is another one, or a stream is dropped."""
    first, bodies = resumable.base_url, [body_of(number, 2800 + number) for number in range(len(FIELDS))]
    bodies = [body | {"max_tokens": MAX_TOKENS} for body in bodies]
    async with second_router(resumable, tmp_path) as router, aiohttp.ClientSession() as http:
        second = router.url
        undisturbed = await asyncio.gather(*(whole(http, first, body) for body in bodies))
        clients = [Client(http, body, (first, second)[:: 1 - 2 * (number % 2)]) for number, body in enumerate(bodies)]
        is_over = asyncio.Event()

        async def until_a_stream_has_started_at(url: str) -> None:
            def has_started() -> bool:
                return any(client.has_started_at(url) for client in clients if client.is_long)

            await resumable.until_async(has_started, f"a stream has begun at {url}", timeout_s=READY_S)

        def is_idle() -> bool:
            status = get_model(second, "/v1/cluster", ClusterStatus).router
            return status.running == status.queued == 0

        async with asyncio.TaskGroup() as tasks:
            for client, expected in zip(clients, undisturbed, strict=True):
                tasks.create_task(client.run(is_over, content_of(expected)))
            for name in WORKERS:
                await restarted(resumable, name)
            await until_a_stream_has_started_at(first)
            await restart_router(resumable)
            await until_a_stream_has_started_at(second)
            await router.stop()
            await router.start()
            is_over.set()
        assert all(client.num_complete for client in clients)
        resumed = sum((client.resumed for client in clients), Counter())
        assert resumed[first] > 0
        assert resumed[second] > 0
        await resumable.until_async(is_idle, "the other router is idle")
        resumable.wait_tiers(prefill=2, decode=2)
        resumable.wait_idle()
