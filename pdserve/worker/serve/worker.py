"""What a tier's service works with, and what it must offer in return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import grpc

from kernels.choice import Backend
from kvtransfer.handover.memory import BlockMemory
from kvtransfer.transport import Transport
from pdserve.base.block_hash import hash_key
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.registry import Tier
from pdserve.base.tasks import ServiceGroup
from pdserve.engine.loop import LoopConfig, StepLoop
from pdserve.engine.step import LayersWritten, Load, Scheduler, StepOutput
from pdserve.worker.config import WorkerConfig
from pdserve.worker.kv_bytes.host import block_memory
from pdserve.worker.load.cores import num_cores
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.serve.active_calls import ActiveCalls
from pdserve.worker.serve.loaded_model import LoadedModel, warm_up
from pdserve.worker.serve.loop_calls import LoopCalls
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.step_metrics import StepMetrics

T = TypeVar("T")


class TierService(Protocol):
    """What a tier adds: its policy and its gRPC methods."""

    @property
    def name(self) -> str:
        """Full name of the gRPC service."""

    @property
    def scheduler(self) -> Scheduler:
        """The tier's policy, driven by the step thread."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that one step computes at most."""

    @property
    def itl_budget_s(self) -> float | None:
        """What a step with prompt tokens beside decoding sequences may take; None where nothing decodes."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the gRPC methods."""

    async def start(self, grpc_address: str) -> str:
        """The gRPC server listens, requests come from now on. Returns `WorkerRecord.stream_address`."""

    def on_step(self, output: StepOutput) -> None:
        """What a step has to tell, on the event loop, in order."""

    def on_layers(self, written: LayersWritten) -> None:
        """What a plan asked to be told during its step, on the event loop: between `on_step` of the steps around it."""

    async def close(self) -> None:
        """No call is left."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process. Everything belongs to the event loop; `run` is the way to the step thread."""

    config: WorkerConfig
    tier: Tier
    worker_id: WorkerId
    epoch: Epoch
    model: LoadedModel
    transport: Transport
    metrics: WorkerMetrics
    tasks: ServiceGroup
    calls: ActiveCalls = field(default_factory=ActiveCalls)
    steps: StepMetrics = field(init=False)
    #: The KV cache as transports reach it.
    blocks: BlockMemory = field(init=False)
    _scheduler: Scheduler | None = None
    _loop: StepLoop | None = None
    _told: LoopCalls | None = None  # By the step thread.

    def __post_init__(self) -> None:
        self.steps = StepMetrics(self.metrics)
        model, staging_bytes = self.model, self.config.staging_memory
        if model.team is not None:
            self.blocks = model.team.block_memory(model.layout, model.kv_cache, staging_bytes)
        elif self.config.handover_memory == "device":
            # Imported on use: Triton takes a second.
            from pdserve.worker.kv_bytes.device import device_block_memory

            self.blocks = device_block_memory(model.kv_cache, staging_bytes)
        else:
            self.blocks = block_memory(model.kv_cache, staging_bytes)

    def hash_key(self, salt: bytes) -> bytes:
        """The key of block hashes for prompts of one tenant."""
        layout = self.model.layout
        return hash_key(model=layout.model, dtype=layout.dtype, block_size=layout.block_size, salt=salt)

    async def run(self, fn: Callable[[], T]) -> T:
        """Runs `fn` on the step thread between two steps. A cancelled caller does not undo it."""
        try:
            # Shielded: cancelling the wrapped future would take back a call that has not run yet.
            return await asyncio.shield(asyncio.wrap_future(self.post(fn)))
        finally:
            if self._told is not None:  # What was told before the call, the caller sees before its result.
                self._told.deliver()

    def post(self, fn: Callable[[], T]) -> Future[T]:
        """As `run`, without waiting. The future belongs to the step thread; its result may overtake what steps tell."""
        assert self._loop is not None, "the step loop runs before requests are served"
        scheduler, told = self._scheduler, self._told
        assert scheduler is not None
        assert told is not None

        def call() -> T:
            try:
                return fn()
            finally:
                # Blocks may have been taken or freed without a step: what is reported stays true.
                told.post(self.steps.set_load, scheduler.load())

        return self._loop.call(call)

    @asynccontextmanager
    async def computing(self, service: TierService) -> AsyncIterator[asyncio.Future[BaseException]]:
        """The step thread, started and warm. Yields a future that is set when it dies."""
        fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        def on_step(output: StepOutput) -> None:
            self.steps.observe(output)
            service.on_step(output)

        def end(error: BaseException) -> None:
            if not fatal.done():  # A lost rank is heard of in two ways.
                fatal.set_result(error)

        with closing(LoopCalls()) as told:

            def die(error: BaseException) -> None:
                told.post(end, error)

            self._told, self._scheduler = told, service.scheduler
            self._loop = StepLoop(
                service.scheduler,
                self.model.runner,
                publish=lambda output: told.post(on_step, output),
                on_fatal=die,
                on_layers=lambda written: told.post(service.on_layers, written),
                config=self._loop_config(),
            )
            self._loop.start()
            if self.model.team is not None:
                self.model.team.watch(die)
            try:
                await self.run(lambda: warm_up(self.model))
                yield fatal
            finally:
                if self.model.team is not None:
                    self.model.team.watch(lambda error: None)
                await asyncio.to_thread(self._loop.stop)

    def _loop_config(self) -> LoopConfig:
        """C++ kernels bring threads of their own, pinned to the other cores: torch's would only be in their way."""
        own = config_of_rank(self.config, 0, num_cores=num_cores())
        cpus, threads = own.cpus, own.threads or len(own.cpus)
        if self.model.kernels.backend is Backend.CPU:
            cpus, threads = cpus[:1], 1
        config = LoopConfig(compute_cpus=cpus or None, num_threads=threads or None, name=f"{self.tier}-step")
        leases = self.model.core_leases
        return config if leases is None else replace(config, on_busy=leases.set_busy)

    @property
    def load(self) -> Load:
        """The load as last told by the step thread."""
        return self.steps.load
