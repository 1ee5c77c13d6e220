"""A simulated router process: everything of the product's `Router` but its HTTP and gRPC servers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pdserve.base.admin import Health
from pdserve.base.errors import PdserveError, StoreError
from pdserve.base.ids import RequestId
from pdserve.base.tasks import service_group
from router_svc.config import RouterConfig
from router_svc.generation import Generation
from router_svc.request.output import ChoiceDelta
from router_svc.service import Router
from tests.simulation.loop import Process, StableTask
from tests.simulation.model import EOS, MAX_MODEL_LEN, VOCAB_SIZE
from tests.simulation.network import End, Network
from tests.simulation.redis_link import open_store

PORT = 80


class Letters:
    """The tokenizer of the simulated model, as `Output` uses it: a token is a letter."""

    strips_first_space = False
    is_isolated = False

    def token_bytes(self, token_id: int) -> bytes:
        """One ASCII character."""
        return bytes((48 + token_id,))

    def is_special(self, token_id: int) -> bool:
        """Only the end of text is."""
        return token_id == EOS

    def close(self) -> None:
        """Nothing is open."""


def letters(token_ids: list[int]) -> str:
    """The text of these tokens."""
    return "".join(chr(48 + token) for token in token_ids if token != EOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request: the first item on its connection."""

    generation: Generation
    timeout_s: float | None = None


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
    process: Process = field(init=False)
    router: Router | None = None
    is_ready: bool = False
    #: When a request came last, and when it ended.
    times: dict[RequestId, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process = Process(self.name)
        self.process.on_death.append(lambda with_host: self.network.kill_ends(self.process, with_host))

    def start(self, secret: Any = None) -> None:
        """Runs the process."""
        self.network.loop.start(self.process, self._run(secret), self.name)

    async def _run(self, secret: Any) -> None:
        model: Any = SimpleNamespace(
            tokenizer=Letters(),
            threads=SimpleNamespace(),
            max_position_embeddings=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            close=lambda: None,
        )
        config = RouterConfig(
            model="/simulated",
            redis_url="redis://redis:6379",
            served_model_name="simulated",
            console=False,
            local_prefill_threshold=self.local_prefill_threshold,
            worker_return_timeout_s=self.worker_return_timeout_s,
        )
        async with AsyncExitStack() as stack:
            health = Health(not_ready="starting")
            store = await stack.enter_async_context(open_store(self.network))
            router = self.router = Router(config, model, store, health)
            if secret is not None:
                router.cluster.seals._secret = secret
            group = await stack.enter_async_context(service_group())
            grpc_health: Any = _GRPC_HEALTH
            for name, work in (
                ("directory", router.cluster.directory.run()),
                ("mirror", router._mirror.run()),
                ("request-store", router._request_store.run()),
                ("usage", router._usage.run()),
                ("quarantine", router._shared_quarantine.run()),
                ("clock-skew", router._clock_skew.run()),
                ("cancels", router._cancels.run()),
                ("cluster", router._follow_cluster(grpc_health)),
            ):
                group.start(work, name=name)
            while not (router.cluster.ready("decode") and router.cluster.ready("prefill")):
                await router.cluster.directory.wait_for_change()
            self.network.listen(f"{self.name}:{PORT}", self.process, self._on_open)
            self.is_ready = True
            await asyncio.Event().wait()

    # One request of a client is a connection.
    def _on_open(self, end: End) -> None:
        def on_item(call: ClientRequest | CancelRequest) -> None:
            serving = self._serve(end, call) if isinstance(call, ClientRequest) else self._cancel(end, call)
            task = self.network.loop.create_task(serving, name="request")
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
        assert self.router is not None
        generation, opened_requests = call.generation, self.router._requests.open
        timeout_s = opened_requests.limits.of_header(None) if call.timeout_s is None else call.timeout_s
        arrived_at = self.network.loop.time()
        window = asyncio.Event()
        window.set()
        end.on_window = lambda is_open: window.set() if is_open else window.clear()
        try:
            async with (
                opened_requests.entered(generation.request_id, "", timeout_s) as opened,
                self.router._requests.run([generation], opened=opened) as stream,
            ):

                async def write(deltas: list[ChoiceDelta]) -> None:
                    end.send(("deltas", deltas))
                    stream.first_write()
                    await window.wait()

                async def keep_alive() -> None:
                    end.send(("keep-alive", None))

                await stream.write_to(write, keep_alive)
                end.send(("done", stream.usage))
        except PdserveError as error:
            end.send(("error", f"{type(error).__name__}: {error}"))
        except ConnectionResetError as error:
            end.send(("slow", str(error)))
        finally:
            self.times[generation.request_id] = arrived_at, self.network.loop.time()
            end.close()

    def leftovers(self) -> list[str]:
        """What a live router without requests must not hold."""
        router, found = self.router, []
        if self.process.is_dead or router is None:
            return []
        if router.num_open:
            found.append(f"{router.num_open} requests are open")
        if router._gate.num_waiting or router._gate.num_admitted:
            found.append(f"{router._gate.num_waiting} prompts wait and {router._gate.num_admitted} are admitted")
        in_flight = router.cluster.in_flight
        if in_flight._sequences or in_flight._prompt_tokens:
            found.append(f"work is counted: {in_flight._sequences} sequences, {in_flight._prompt_tokens} tokens")
        return [f"{self.name}: {each}" for each in found]


def _cancel(task: StableTask) -> None:
    task.cancel()


class _GrpcHealth:
    async def set_serving(self, serving: bool) -> None:
        """Nobody asks."""


_GRPC_HEALTH: Any = _GrpcHealth()
