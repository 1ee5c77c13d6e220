"""A router with scripted workers. HTTP, gRPC and Redis are real, and there is no model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.net.admin import Health
from pdserve.net.rpc import open_channel
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from pdserve.peers.registry import read_sightings
from pdserve.peers.secret import read_secret
from pdserve.peers.workers import Tier
from pdserve.redis.store import Store
from router_svc.api.served_model import ServedModel
from router_svc.config import RouterConfig
from router_svc.routing.cluster import TIERS
from router_svc.service import Router
from router_svc.state.opening import opened_state
from tests.integration.router_svc.fake_workers import FakeWorker, fake_worker
from tests.integration.router_svc.script import CallLog, Script
from tests.support.deadline import DEADLINE_S
from tests.support.lazily import openai
from tests.support.own_task import in_own_task
from tests.support.redis import eventually, until
from tests.support.tiny_model import NAME, model_dir

__all__ = ["model_dir"]


TWO_OF_EACH: dict[str, Tier] = {
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}


@dataclass
class ScriptedCluster:
    """A router with scripted workers, and clients for it."""

    base_url: str
    #: Where operators ask; the same unless the router has an admin port.
    admin_url: str
    grpc_address: str
    calls: CallLog
    router: Router
    http: aiohttp.ClientSession
    workers: dict[str, FakeWorker]

    @property
    def script(self) -> Script:
        """The workers' replies and faults."""
        return self.calls.script

    def client(self) -> openai.AsyncOpenAI:
        """OpenAI's client without retries. The caller closes it."""
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    async def complete(self, **fields: object) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a completion that is not streamed."""
        return await self.post("/v1/completions", {"model": NAME, "prompt": "Say hello", "max_tokens": 50} | fields)

    async def stream(self, **fields: object) -> tuple[str, list[dict[str, Any]]]:
        """The text of the first choice of a streamed completion, and all events. Checks that the last is [DONE]."""
        body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50, "stream": True} | fields
        async with self.http.post(f"{self.base_url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            # Comments keep the stream open.
            lines = [line.decode() async for line in response.content if line.strip() and not line.startswith(b":")]
        assert lines[-1].strip() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        choices = [choice for event in events for choice in event.get("choices", [])]
        return "".join(choice["text"] for choice in choices if choice["index"] == 0), events

    async def post(self, path: str, body: object = None, **options: object) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST."""
        if body is not None:
            options["json"] = body
        else:
            options.setdefault("headers", {"Content-Type": "application/json"})
        async with self.http.post(self.base_url + path, **options) as response:  # type: ignore[arg-type]
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a GET."""
        async with self.http.get(self.base_url + path) as response:
            return response.status, await response.json()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        families = self.router.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name == f"pdserve_{name}"]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def only_trace(self) -> dict[str, Any]:
        """The decision record of the only request so far."""
        [request_id] = {start.ref.request_id for start in self.calls.decode_starts} | {
            prefill.ref.request_id for prefill in self.calls.prefills
        }
        return await self.trace(request_id)

    async def trace(self, request_id: str) -> dict[str, Any]:
        """A request's decision record."""
        status, record = await self.get(f"/v1/requests/{request_id}/trace")
        assert status == 200, record
        return record

    async def knows(self, count: int) -> None:
        """Returns once the router knows this many ready workers."""
        cluster = self.router.cluster
        await until(cluster.directory, lambda: sum(len(cluster.ready(tier)) for tier in TIERS) == count)

    async def is_ready_if_it_can_be(self) -> bool:
        """Whether the router's readiness is up to date with its workers."""
        return self.router.health.is_ready == bool(self.router.cluster.ready("decode"))

    def channel(self) -> grpc.aio.Channel:
        """A channel to the gRPC API. The caller closes it."""
        return open_channel(self.grpc_address)


async def _are_registered(store: Store, worker_ids: set[str]) -> bool:
    return worker_ids <= {sighting.record.worker_id for sighting in await read_sightings(store)}


@asynccontextmanager
async def open_cluster(
    redis: PrivateRedis,
    model_dir: Path,
    tiers: dict[str, Tier],
    *,
    tracer: Tracer = NO_TRACER,
    script: Script | None = None,
    **settings: object,
) -> AsyncIterator[ScriptedCluster]:
    """A router and its workers. Starts when the router knows all of them.

    `script`: for what the router makes on its own as soon as it has workers.
    """
    defaults: dict[str, object] = {
        "model": (str(model_dir),),
        "redis_url": redis.url,
        "port": 0,
        "local_prefill_threshold": 0,
        "prefill_expected": 1 if "prefill" in tiers.values() else 0,
        "reserve_timeout_s": DEADLINE_S,
        "token_timeout_s": DEADLINE_S,
    }
    config = RouterConfig(**(defaults | settings))
    calls = CallLog(script or Script())
    async with AsyncExitStack() as stack:
        health = Health()
        store = await stack.enter_async_context(Store(redis.url, on_change=health.watch("redis")))
        models = [
            ServedModel.load(directory, name, message_format=config.message_format)
            for name, directory in config.models.items()
        ]
        opened = opened_state(
            config.state_url,
            ttl_s=config.state_ttl_s,
            prefix=config.redis_prefix,
            on_change=health.watch("state"),
            secret=read_secret(config.cluster_secret_file),
        )
        state = await stack.enter_async_context(opened)
        workers = {
            worker_id: await stack.enter_async_context(fake_worker(calls, tier, worker_id, redis.url))
            for worker_id, tier in tiers.items()
        }
        # A router reads the registry as it starts. What it does not find then, it finds half a second later.
        await eventually(lambda: _are_registered(store, set(tiers)))
        router = Router(config, models, store, health, tracer, state)
        addresses = await stack.enter_async_context(router.serving())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls = f"http://{addresses.http}", f"http://{addresses.admin or addresses.http}"
        cluster = ScriptedCluster(*urls, addresses.grpc, calls, router, http, workers)
        await cluster.knows(len(tiers))
        await eventually(cluster.is_ready_if_it_can_be)
        yield cluster
        # No call may outlive its request.
        await calls.until(lambda: calls.num_open == 0)


@pytest.fixture
async def cluster(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[ScriptedCluster]:
    """Two prefill workers, two decode workers."""
    tiers: dict[str, Tier] = {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    async with in_own_task(open_cluster(redis_server, model_dir, tiers)) as opened:
        yield opened


@pytest.fixture
async def small_cluster(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[ScriptedCluster]:
    """One worker of each tier."""
    tiers: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
    async with in_own_task(open_cluster(redis_server, model_dir, tiers)) as opened:
        yield opened
