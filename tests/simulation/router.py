"""A simulated router process: everything of the product's `Router` but its HTTP and gRPC servers."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from pdserve.base.errors import PdserveError, StoreError
from pdserve.base.ids import RequestId
from pdserve.base.tasks import service_group
from pdserve.net.admin import Health
from router_svc.api.event_ids import EventIds, parse_event_id
from router_svc.api.resuming import HTTP, event_ids
from router_svc.config import RouterConfig
from router_svc.generation import Generation
from router_svc.records.resumable import ResponseShape
from router_svc.request.client import ANONYMOUS
from router_svc.request.open_requests import OpenRequest
from router_svc.request.output import ChoiceDelta
from router_svc.request.replayed import ReplayedStream
from router_svc.request.stream import DeltaStream
from router_svc.service import Router
from tests.simulation.loop import Process, StableTask
from tests.simulation.model import MAX_MODEL_LEN
from tests.simulation.network import End, Network
from tests.simulation.redis_link import open_store
from tests.simulation.vocabulary import VOCAB_SIZE, Letters

PORT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request: the first item on its connection."""

    prompts: tuple[Generation, ...]
    timeout_s: float | None = None
    #: `Last-Event-ID` of a stream that goes on; None: it is a new request.
    last_event_id: str | None = None

    @property
    def request_id(self) -> RequestId:
        """That of the first prompt."""
        return self.prompts[0].request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """`POST /v1/requests/{id}/cancel`, on a connection of its own."""

    request_id: RequestId


@dataclass(eq=False)
class SimulatedRouter:
    """One incarnation of a router."""

    name: str
    network: Network
    local_prefill_threshold: int
    worker_return_timeout_s: float
    resume_timeout_s: float
    process: Process = field(init=False)
    router: Router | None = None
    is_ready: bool = False
    has_ended: bool = False
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    #: Requests of clients.
    _serving: set[StableTask] = field(default_factory=set)
    #: When a request came last, and when it ended.
    times: dict[RequestId, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process = Process(self.name)
        self.process.on_death.append(lambda with_host: self.network.kill_ends(self.process, with_host))

    def start(self, secret: Any = None) -> None:
        """Runs the process."""
        self.network.loop.start(self.process, self._run(secret), self.name)

    def terminate(self, grace_s: float) -> None:
        """As SIGTERM: the router refuses what comes, and ends when its requests have, or after the grace."""
        if self.router is not None:
            self.router.config = replace(self.router.config, drain_timeout_s=grace_s)
            self.network.loop.call_soon(self._stop.set, context=self.process.context)

    async def _run(self, secret: Any) -> None:
        model: Any = SimpleNamespace(
            name="simulated",
            tokenizer=Letters(),
            threads=SimpleNamespace(),
            max_context=MAX_MODEL_LEN,
            default_context=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            close=lambda: None,
        )
        config = RouterConfig(
            model=("/simulated",),
            redis_url="redis://redis:6379",
            served_model_name=("simulated",),
            console=False,
            local_prefill_threshold=self.local_prefill_threshold,
            worker_return_timeout_s=self.worker_return_timeout_s,
            resume_timeout_s=self.resume_timeout_s,
        )
        async with AsyncExitStack() as stack:
            health = Health(not_ready="starting")
            store = await stack.enter_async_context(open_store(self.network))
            router = self.router = Router(config, [model], store, health)
            if secret is not None:
                router.cluster.seals._secret = secret
            group = await stack.enter_async_context(service_group())
            grpc_health: Any = _GRPC_HEALTH
            for name, work in (
                ("directory", router.cluster.directory.run()),
                ("mirror", router._mirror.run()),
                ("request-store", router._request_store.run()),
                ("usage", router._usage.run()),
                ("quarantine", router._quarantines[0].run()),
                ("clock-skew", router._clock_skew.run()),
                ("cancels", router._cancels.run()),
                ("stream-logs", router._logs.run()),
                ("cluster", router._follow_cluster(grpc_health)),
            ):
                group.start(work, name=name)
            while not (router.cluster.ready("decode") and router.cluster.ready("prefill")):
                await router.cluster.directory.wait_for_change()
            self.network.listen(f"{self.name}:{PORT}", self.process, self._on_open)
            self.is_ready = True
            await self._stop.wait()
            self.is_ready = False
            await router.drain()
            await self._stop_serving()
        await router.cluster.channels.close()
        self.has_ended = True
        self.network.loop.call_soon(self.network.loop.kill, self.process)

    async def _stop_serving(self) -> None:
        """As the HTTP server, without the time that it gives responses beyond the drain."""
        self.network.unlisten(f"{self.name}:{PORT}", self.process)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    # One request of a client is a connection.
    def _on_open(self, end: End) -> None:
        def on_item(call: ClientRequest | CancelRequest) -> None:
            serving = self._serve(end, call) if isinstance(call, ClientRequest) else self._cancel(end, call)
            task = self.network.loop.create_task(serving, name="request")
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            end.on_lost = lambda error: _cancel(task)

        end.on_item = on_item

    async def _cancel(self, end: End, call: CancelRequest) -> None:
        assert self.router is not None
        try:
            end.send(("cancelled", await self.router._cancels.cancel(call.request_id, None)))
        except StoreError as error:
            end.send(("error", str(error)))
        finally:
            end.close()

    async def _serve(self, end: End, call: ClientRequest) -> None:
        arrived_at = self.network.loop.time()
        try:
            if call.last_event_id is None:
                await self._start(end, call)
            else:
                await self._resume(end, call, call.last_event_id)
        except PdserveError as error:
            end.send(("error", f"{type(error).__name__}: {error}"))
        except ConnectionResetError as error:
            end.send(("slow", str(error)))
        finally:
            self.times[call.request_id] = arrived_at, self.network.loop.time()
            end.close()

    async def _start(self, end: End, call: ClientRequest) -> None:
        assert self.router is not None
        request_id = call.request_id
        shape = ResponseShape(
            response_id=request_id,
            header_id=request_id,
            model="simulated",
            created=0,
            include_usage=True,
            continuous_usage=False,
        )
        async with self._opened(call) as opened:
            log = self.router._resuming.new_log(ANONYMOUS, HTTP, shape, call.prompts)
            async with self.router.models.first.requests.run(call.prompts, opened=opened, log=log) as stream:
                await _pass_on(end, stream, None if log is None else event_ids(log))

    async def _resume(self, end: End, call: ClientRequest, last_event_id: str) -> None:
        assert self.router is not None
        seen, resuming = parse_event_id(last_event_id), self.router._resuming
        log, is_complete = await resuming.found(ANONYMOUS, HTTP, call.request_id, seen)
        ids = event_ids(log, seen)
        if is_complete:
            await _pass_on(end, ReplayedStream(log, self.router.models.first.model.tokenizer), ids)
            return
        async with (
            self._opened(call) as opened,
            self.router.models.first.requests.run(log.resumable.generations, opened=opened, log=log) as stream,
        ):
            await _pass_on(end, stream, ids)

    def _opened(self, call: ClientRequest) -> AbstractAsyncContextManager[OpenRequest]:
        assert self.router is not None
        opened = self.router._open
        timeout_s = opened.limits.of_header(None) if call.timeout_s is None else call.timeout_s
        return opened.entered(call.request_id, "", timeout_s)

    def leftovers(self) -> list[str]:
        """What a live router without requests must not hold."""
        router, found = self.router, []
        if self.process.is_dead or router is None:
            return []
        if router.num_open:
            found.append(f"{router.num_open} requests are open")
        gate = router.models.first.gate
        if gate.num_waiting or gate.num_admitted:
            found.append(f"{gate.num_waiting} prompts wait and {gate.num_admitted} are admitted")
        in_flight = router.cluster.in_flight
        if in_flight._sequences or in_flight._prompt_tokens:
            found.append(f"work is counted: {in_flight._sequences} sequences, {in_flight._prompt_tokens} tokens")
        if router._resuming.logs._open:
            found.append(f"{len(router._resuming.logs._open)} streams are kept as open")
        return [f"{self.name}: {each}" for each in found]


async def _pass_on(end: End, stream: DeltaStream | ReplayedStream, ids: EventIds | None) -> None:
    """To the client, with the ids of events where they have some."""
    window = asyncio.Event()
    window.set()
    end.on_window = lambda is_open: window.set() if is_open else window.clear()

    async def write(deltas: list[ChoiceDelta]) -> None:
        names = [None if ids is None else ids.after(delta) for delta in deltas]
        end.send(("deltas", [each for each in zip(deltas, names, strict=True) if ids is None or each[1] is not None]))
        stream.first_write()
        await window.wait()

    async def keep_alive() -> None:
        end.send(("keep-alive", None))

    await stream.write_to(write, keep_alive)
    end.send(("done", stream.usage))


def _cancel(task: StableTask) -> None:
    task.cancel()


class _GrpcHealth:
    async def set_serving(self, serving: bool) -> None:
        """Nobody asks."""


_GRPC_HEALTH: Any = _GrpcHealth()
