"""Workers that strangers send messages to, a router to which workers send anything, and a transport's control port."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pdserve.cli.private_redis import PrivateRedis
from tests.fuzz.area import Area, Feeder
from tests.fuzz.internal import inputs
from tests.fuzz.internal.router import Announcements, Routers
from tests.fuzz.internal.workers import Workers
from tests.integration.router_svc.conftest import open_cluster
from tests.integration.services.local_cluster import running_cluster
from tests.support.tiny_model import NAME, write_model
from tests.unit.model.tiny import save_model


class InternalFeeder:
    """Everything that takes messages from inside a cluster."""

    def __init__(self, workers: Workers, routers: Routers, announcements: Announcements) -> None:
        self._workers, self._routers = workers, routers
        self._targets: dict[str, Callable[[bytes], Awaitable[str]]] = {
            "start": workers.start,
            "stream": workers.stream,
            "commands": workers.commands,
            "prompt": workers.prompt,
            "commit": workers.commit,
            "introduction": workers.introduction,
            "data_address_request": workers.data_address_request,
            "probe": workers.probe,
            "events": routers.events,
            "prefill_events": routers.prefill_events,
            "control": announcements.control,
            "address": announcements.address,
        }

    async def feed(self, target: str, data: bytes) -> str:
        """Gives the input to its target."""
        return await self._targets[target](data)

    async def check(self) -> None:
        """Workers and router give the answers of before, and hold nothing."""
        await self._workers.check()
        await self._routers.check()


@asynccontextmanager
async def open_feeder() -> AsyncIterator[Feeder]:
    """Starts everything."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_model(directory / "weights")
        secret = directory / "secret"
        secret.write_text("the-secret-of-this-cluster\n")
        settings: dict[str, object] = {"cluster_secret_file": str(secret)}
        opened = await stack.enter_async_context(running_cluster(model))
        sealed = await stack.enter_async_context(running_cluster(model, prefill=settings, decode=settings))
        workers = Workers(opened, sealed)
        await workers.learn()
        redis = await stack.enter_async_context(PrivateRedis())
        tiers = {"prefill-0": "prefill", "decode-0": "decode"}
        router = await stack.enter_async_context(
            open_cluster(redis, write_model(directory / NAME), tiers, token_timeout_s=1.0)  # type: ignore[arg-type]
        )
        yield InternalFeeder(workers, Routers(router), Announcements())


AREA = Area(
    name="internal",
    targets={
        make.__name__: make
        for make in (
            inputs.start,
            inputs.stream,
            inputs.commands,
            inputs.prompt,
            inputs.commit,
            inputs.introduction,
            inputs.data_address_request,
            inputs.probe,
            inputs.events,
            inputs.prefill_events,
            inputs.control,
            inputs.address,
        )
    },
    open=open_feeder,
)
