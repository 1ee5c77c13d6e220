"""A simulated worker process: the product's `Worker`, service, scheduler, handover, registrar and KV events."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from decode_svc.config import DecodeConfig
from decode_svc.request import DecodePhase
from decode_svc.service import DecodeService
from kernels.choice import Backend, KernelChoice
from pdserve.base.errors import Draining
from pdserve.base.ids import RequestId, WorkerId, new_epoch
from pdserve.base.tasks import service_group
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.net.admin import Health
from pdserve.peers.seals import Seals
from pdserve.worker.kv_bytes.host_blocks import staged
from pdserve.worker.serve import process as worker_process
from pdserve.worker.serve.announce import WorkerAddresses, announce
from pdserve.worker.serve.grammars import Grammars
from pdserve.worker.serve.loaded_model import LoadedModel
from pdserve.worker.serve.manual_drain import ManualDrain
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.worker import Worker
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillService
from tests.simulation.calls import Server
from tests.simulation.engine import SimulatedRunner
from tests.simulation.loop import Process
from tests.simulation.model import LAYOUT, MAX_MODEL_LEN
from tests.simulation.network import Network
from tests.simulation.redis_link import open_store
from tests.simulation.vocabulary import EOS, VOCAB_SIZE
from tests.simulation.wire import WireFaults, WireTransport

NAME = "simulated"
#: Tokens of the longest prompts.
LONGEST_PROMPT = 40
_GRPC_PORT, STREAM_PORT = 5001, 5002


@dataclass(kw_only=True)
class WorkerPlan:
    """How the workers of one episode are set up."""

    num_blocks: dict[str, int]
    lease_s: float = 8.0
    layer_groups: int = 1
    #: Blocks pass through a stage, as on a GPU.
    is_staged: bool = False
    #: Blocks are offered in memory that all workers see, as within a host.
    is_local: bool = False
    bundle_blocks: int = 1
    max_num_seqs: int = 8
    chunk_tokens: int = 8
    #: Grace of a worker that shuts down.
    drain_timeout_s: float = 20.0
    #: Short, as the requests are: they have copies after two of these.
    replication_interval_ms: float = 10.0

    @property
    def longest_output(self) -> int:
        """Tokens of the longest outputs that a decode worker holds beside the longest prompt."""
        return min(self.num_blocks["decode"] * LAYOUT.block_size, MAX_MODEL_LEN) - LONGEST_PROMPT - 2


@dataclass(eq=False)
class SimulatedWorker:
    """One incarnation of a worker."""

    name: str
    network: Network
    plan: WorkerPlan
    faults: WireFaults
    directory: dict[bytes, WireTransport]
    process: Process = field(init=False)
    worker: Worker | None = None
    service: Any = None
    transport: WireTransport | None = None
    is_ready: bool = False
    _stop: asyncio.Event | None = None
    _manual_drain: ManualDrain | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.process = Process(self.name)
        self.process.on_death.append(lambda with_host: self.network.kill_ends(self.process, with_host))
        self.process.on_death.append(lambda with_host: self.transport and self.transport.die(with_host))

    def start(self, secret: Any = None) -> None:
        """Runs the process."""
        self.network.loop.start(self.process, self._run(secret), self.name)

    def terminate(self) -> None:
        """As SIGTERM: the worker drains and ends."""
        if self._stop is not None:
            self.network.loop.call_soon(self._stop.set, context=self.process.context)

    def drain(self, for_s: float) -> None:
        """As `pdserve drain`, and `--undo` after that time."""
        if self._manual_drain is not None and self.is_ready and not self.process.is_dead:
            self.network.loop.start(self.process, self._drain(self._manual_drain, for_s), "drain")

    async def _drain(self, drain: ManualDrain, for_s: float) -> None:
        with suppress(Draining):
            await drain.start()
            await asyncio.sleep(for_s)
            await drain.undo()

    @property
    def tier(self) -> Any:
        """By its name."""
        return "prefill" if self.name.startswith("p") else "decode"

    async def _run(self, secret: Any) -> None:
        self._stop = asyncio.Event()
        plan, tier = self.plan, self.tier
        health, metrics = Health(), WorkerMetrics(model_name=NAME, tier=tier)
        config = self._config()
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_store(self.network))
            self.transport = WireTransport(self.network, self.faults, self.directory)
            await self.transport.prepare()
            stack.push_async_callback(self.transport.close)
            tasks = await stack.enter_async_context(service_group())
            grammars = Grammars(config.model_dir)
            stack.callback(grammars.close)
            model = loaded_model(plan.num_blocks[tier], is_shared=plan.is_local)
            worker = self.worker = Worker(
                config=config,
                tier=tier,
                worker_id=WorkerId(self.name),
                epoch=new_epoch(),
                model=model,
                grammars=grammars,
                transport=self.transport,
                metrics=metrics,
                tasks=tasks,
                seals=Seals(secret, on_refused=metrics.peer_refused),
            )
            if plan.is_staged:
                worker.blocks = _staged(model.kv_cache, plan)
            self._watch_writes()
            service: Any = PrefillService(worker, config) if tier == "prefill" else DecodeService(worker, config)
            self.service = service
            address = f"{self.name}:{_GRPC_PORT}"
            server = Server(self.network)
            service.register(server)
            async with worker.computing(service) as fatal:
                try:
                    server.listen(address)
                    streams = await service.start(address)
                    addresses = WorkerAddresses(grpc=address, http=f"{self.name}:5003", streams=streams)
                    registrar = announce(worker, service, store=store, health=health, addresses=addresses)
                    await worker_process._start_accepting(worker, health, _GRPC_HEALTH, registrar)
                    publish = partial(worker_process._publish_readiness, health, _GRPC_HEALTH, registrar)
                    self._manual_drain = ManualDrain(worker.worker_id, service, worker.calls, health, publish)
                    self.is_ready = True
                    await worker_process._unless_fatal(self._stop.wait(), fatal, health)
                    self.is_ready = False
                    await worker_process._stop_accepting(worker, health, _GRPC_HEALTH, registrar)
                    await worker_process._drain(worker, service, fatal, health)
                finally:
                    await server.stop(address)
                    await service.close()
        self.has_ended = True
        self.network.loop.call_soon(self.network.loop.kill, self.process)

    def _config(self) -> Any:
        plan = self.plan
        common: dict[str, Any] = {
            "model": f"/{NAME}",
            "redis_url": "redis://redis:6379",
            "served_model_name": NAME,
            "worker_id": self.name,
            "host": self.name,
            "block_size": LAYOUT.block_size,
            "drain_timeout_s": plan.drain_timeout_s,
            "max_num_batched_tokens": plan.chunk_tokens,
            "threads": 1,
        }
        if self.tier == "prefill":
            return PrefillConfig(**common)
        groups = plan.layer_groups
        return DecodeConfig(
            **common,
            stream_port=STREAM_PORT,
            max_num_seqs=plan.max_num_seqs,
            lease_s=plan.lease_s,
            layer_groups=groups,
            replication_interval_ms=plan.replication_interval_ms,
        )

    def _watch_writes(self) -> None:
        """Notes it when a transfer writes to a block that no request has reserved."""
        assert self.worker is not None
        assert self.transport is not None
        memory = self.worker.model.kv_cache.memory
        assert memory is not None
        if not self.plan.is_staged:
            start, size = memory.ctypes.data, LAYOUT.block_bytes
            self.transport.on_write = lambda buffer: self._require_reserved([(buffer.ctypes.data - start) // size])
            offers: Any = self.worker.blocks.offers
            offers.pull = self._watched(offers.pull)
            return
        blocks: Any = self.worker.blocks
        blocks.store = self._watched(blocks.store)

    def _watched(self, copy: Any) -> Any:
        async def watched(*arguments: Any) -> Any:
            bundles = next(each for each in arguments if isinstance(each, list))
            self._require_reserved([block for bundle in bundles for block in bundle])
            digests = await copy(*arguments)
            self._require_reserved([block for bundle in bundles for block in bundle])
            return digests

        return watched

    def _require_reserved(self, blocks: list[int]) -> None:
        requests = self.service.scheduler._requests.values()
        reserved = {
            block
            for request in requests
            if request.phase is DecodePhase.RESERVED
            for block in request.prompt_sequence.block_table[request.num_cached // LAYOUT.block_size :]
        }
        for copies in self.service.scheduler.replicas._arriving.values():
            reserved |= set(copies.blocks)
        if stray := set(blocks) - reserved:
            self.network.loop.unnoticed.append(
                f"{self.name}: a transfer writes to blocks {stray}, which it does not own"
            )

    # Looking in from outside.
    def has(self, request_id: RequestId) -> bool:
        """Whether a session works for the request, which holds blocks at most for as long."""
        if self.process.is_dead or self.service is None:
            return False
        return any(name.partition("-")[0] == request_id for name in self.service._inboxes._inboxes)

    @property
    def num_requests(self) -> int:
        """Sessions that are open."""
        return 0 if self.process.is_dead or self.service is None else len(self.service._inboxes._inboxes)

    # Once everything is quiet.
    def leftovers(self) -> list[str]:
        """What a live worker without requests must not hold."""
        worker, found = self.worker, []
        if self.process.is_dead or worker is None or self.service is None:
            return []
        pool = worker.model.pool
        if pool.num_free != pool.num_blocks:
            found.append(f"{pool.num_blocks - pool.num_free} of {pool.num_blocks} blocks are held")
        if pool.num_retained:
            found.append(f"{pool.num_retained} hashes are retained")
        try:
            self.service.scheduler.check_integrity()
        except AssertionError as error:
            found.append(str(error).partition("\n")[0])
        if worker.calls.count:
            found.append(f"{worker.calls.count} calls are open")
        if self.tier == "decode" and self.service.receiver.num_transfers:
            found.append(f"{self.service.receiver.num_transfers} transfers are open")
        if self.transport is not None and self.transport.num_expected:
            found.append(f"{self.transport.num_expected} receives or inboxes wait for messages")
        stage: Any = worker.blocks
        if self.plan.is_staged and len(stage._free) * stage.bundle_blocks != stage.max_blocks:
            found.append("frames of the stage are lent")
        return [f"{self.name}: {each}" for each in found]


class _GrpcHealth:
    async def set_serving(self, serving: bool) -> None:
        """Nobody asks."""


_GRPC_HEALTH: Any = _GrpcHealth()


def loaded_model(num_blocks: int, *, is_shared: bool = False) -> LoadedModel:
    """The simulated model with a KV cache of this size."""
    kv_cache = KvCache(LAYOUT, num_blocks, torch.device("cpu"), is_shared=is_shared)
    decoder: Any = SimpleNamespace(thread_counters=None)
    runner: Any = SimulatedRunner(kv_cache)
    return LoadedModel(
        layout=LAYOUT,
        limits=SequenceLimits(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})),
        decoder=decoder,
        kernels=KernelChoice(backend=Backend.REFERENCE),
        kv_cache=kv_cache,
        pool=BlockPool(num_blocks, LAYOUT.block_size),
        runner=runner,
        core_leases=None,
        rank_group=None,
    )


def _staged(kv_cache: KvCache, plan: WorkerPlan) -> Any:
    frames = torch.zeros(12 * plan.bundle_blocks * LAYOUT.block_bytes, dtype=torch.uint8)
    return staged(kv_cache, frames, plan.bundle_blocks)
