"""`Worker`, which a tier's service builds on, and `TierService`, the interface it implements in return."""

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
from pdserve.base.errors import PdserveError
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.base.tasks import ServiceGroup, run_to_completion
from pdserve.engine.gpu_identity import gpu_identity
from pdserve.engine.loop import LoopConfig, StepLoop
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import LayersWritten, Load, StepOutput
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from pdserve.peers.peer_tls import PeerTls
from pdserve.peers.registry import Tier
from pdserve.peers.seals import Seals, receiver_name
from pdserve.worker.config import WorkerConfig
from pdserve.worker.kv_bytes.host_blocks import block_memory, share_blocks
from pdserve.worker.load.cores import num_cores
from pdserve.worker.load.numerics import numerics_class
from pdserve.worker.load.populate import KvUse
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.serve.active_calls import ActiveCalls
from pdserve.worker.serve.grammars import Grammars
from pdserve.worker.serve.loaded_model import LoadedModel
from pdserve.worker.serve.loop_calls import LoopCalls
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.stall_watch import is_hung
from pdserve.worker.serve.step_metrics import StepMetrics
from pdserve.worker.serve.transport_paths import TransportPaths
from pdserve.worker.serve.warm_up import warm_up

T = TypeVar("T")

#: Largest interval between two messages of a stream to a router; well below any lease.
KEEP_ALIVE_S = 1.0


class TierService(Protocol):
    """A tier's own parts: its scheduling policy and its gRPC methods."""

    @property
    def name(self) -> str:
        """Full name of the gRPC service."""

    @property
    def scheduler(self) -> Scheduler:
        """The tier's policy, which runs on the step thread."""

    @property
    def max_num_seqs(self) -> int:
        """Largest number of sequences in one step."""

    @property
    def itl_budget_s(self) -> float | None:
        """Time limit of a step that computes prompt tokens and decoding sequences; None where nothing decodes."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the gRPC methods."""

    async def start(self, grpc_address: str) -> str:
        """Called once the gRPC server listens, before the first request. Returns `WorkerRecord.stream_address`."""

    def on_step(self, output: StepOutput) -> None:
        """Handles a step's output, on the event loop, in the order of steps."""

    def on_layers(self, written: LayersWritten) -> None:
        """Handles layers written during a step whose plan reports them.

        On the event loop, between `on_step` of the previous step and of this one.
        """

    def drain(self, within_s: float) -> None:
        """No request comes any more. Hands back requests that have not started; others should end within that time."""

    def stay(self) -> None:
        """Takes back `drain`: requests come again, and none has to leave."""

    async def rebalance(self, num_sequences: int) -> int:
        """Asks requests with at most `num_sequences` sequences to move to other workers. Returns how many requests.

        Raises: RequestError in a tier whose requests cannot move.
        """

    def take_role(self, tier: Tier) -> None:
        """The worker has this role from now on; requests of the former one go on. Raises: RequestError if it cannot."""

    def give_up(self, error: PdserveError) -> None:
        """Ends the requests that are still here with this error."""

    def end_idle(self) -> None:
        """Ends calls in which nothing is left to do; called before the gRPC server stops, which waits for its calls."""

    async def close(self) -> None:
        """Ends what the service still runs; called when the gRPC server has stopped."""


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process. Everything belongs to the event loop; `run` and `post` reach the step thread."""

    config: WorkerConfig
    #: Its present role.
    tier: Tier
    worker_id: WorkerId
    epoch: Epoch
    model: LoadedModel
    #: The grammars of its requests.
    grammars: Grammars
    transport: Transport
    metrics: WorkerMetrics
    tasks: ServiceGroup
    #: Seals messages to other processes, and opens messages from them.
    seals: Seals = field(default_factory=Seals)
    #: Certificates for connections to and from others; None: no TLS.
    tls: PeerTls | None = None
    tracer: Tracer = NO_TRACER
    #: The tier in which a worker has started that can change its role; None: it cannot.
    home_tier: Tier | None = None
    calls: ActiveCalls = field(default_factory=ActiveCalls)
    steps: StepMetrics = field(init=False)
    #: Decides about the bits of tokens and blocks.
    numerics_class: str = field(init=False)
    #: The KV cache as transports see it.
    blocks: BlockMemory = field(init=False)
    #: The paths of blocks to other workers.
    paths: TransportPaths = field(init=False)
    _scheduler: Scheduler | None = None
    _loop: StepLoop | None = None
    #: Calls from the step thread to the event loop.
    _loop_calls: LoopCalls | None = None

    def __post_init__(self) -> None:
        self.steps = StepMetrics(self.metrics)
        model, staging_bytes = self.model, self.config.staging_memory
        is_on_device, is_shared = self.config.handover_memory == "device", self.config.uses_local_sockets
        self.numerics_class = str(numerics_class(self.config, model.kernels, model.layout.dtype))
        if model.rank_group is not None:
            self.blocks = model.rank_group.block_memory(model.layout, model.kv_cache, staging_bytes)
        else:
            self.blocks = block_memory(model.kv_cache, staging_bytes, is_on_device=is_on_device, is_shared=is_shared)
        memories, gpu = share_blocks(self.blocks, self.transport), gpu_identity(model.kv_cache.tensor.device)
        self.paths = TransportPaths(
            self.transport, self.metrics, device_memory=is_on_device, gpu=gpu, memories=memories
        )

    @property
    def seal_name(self) -> bytes:
        """This incarnation, as the seals of messages to it name it."""
        return receiver_name(self.worker_id, self.epoch)

    def hash_key(self, salt: bytes) -> bytes:
        """The key of the hashes of blocks that this worker computes, for one tenant's prompts."""
        layout, numerics = self.model.layout, self.numerics_class
        return hash_key(
            model=layout.model,
            dtype=layout.dtype,
            block_size=layout.block_size,
            salt=salt,
            numerics_class=numerics,
        )

    async def run(self, fn: Callable[[], T], *, ends: RequestId | None = None) -> T:
        """Runs `fn` on the step thread between two steps. It has run when this returns, or raises a cancellation.

        `ends`: the request that `fn` ends; a step that computes no other request is not completed first.

        A task that is cancelled therefore waits here while a running step may still report for its request. Otherwise
        the next attempt of the request would get these reports.
        """
        try:
            return await run_to_completion(asyncio.wrap_future(self.post(fn, ends=ends)))
        finally:
            if self._loop_calls is not None:  # The caller sees reports of earlier steps before the result of its call.
                self._loop_calls.deliver()

    @asynccontextmanager
    async def holding(self, take: Callable[[], T], let_go: Callable[[T], None]) -> AsyncIterator[T]:
        """Yields what `take` returns on the step thread, and passes it to `let_go` there when the block ends.

        `let_go` is also called when the caller is cancelled while `take` runs, but not when `take` raises.
        """
        taken: list[T] = []
        try:
            await self.run(lambda: taken.append(take()))
            yield taken[0]
        finally:
            if taken:
                await self.run(lambda: let_go(taken[0]))

    def post(self, fn: Callable[[], T], *, ends: RequestId | None = None) -> Future[T]:
        """Like `run`, without waiting.

        The future belongs to the step thread. Its result may overtake reports of earlier steps.
        """
        step_loop = self.step_loop
        scheduler, loop_calls = self._scheduler, self._loop_calls
        assert scheduler is not None
        assert loop_calls is not None

        def call() -> T:
            try:
                return fn()
            finally:
                # The call may have taken or freed blocks without a step; the reported load has to follow.
                loop_calls.post(self.steps.set_load, scheduler.load())

        return step_loop.call(call) if ends is None else step_loop.end(ends, call)

    @asynccontextmanager
    async def computing(self, service: TierService) -> AsyncIterator[asyncio.Future[BaseException]]:
        """Runs the step thread until the block ends. Yields, once it is warm, a future that is set when it dies."""
        fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        def on_step(output: StepOutput) -> None:
            self.steps.observe(output)
            service.on_step(output)

        def end(error: BaseException) -> None:
            if not fatal.done():  # A lost rank is reported in two ways.
                fatal.set_result(error)

        with closing(LoopCalls()) as loop_calls:

            def die(error: BaseException) -> None:
                loop_calls.post(end, error)

            self._loop_calls, self._scheduler = loop_calls, service.scheduler
            self.show_role(service)
            self._loop = StepLoop(
                service.scheduler,
                self.model.runner,
                publish=lambda output: loop_calls.post(on_step, output),
                on_fatal=die,
                on_layers=lambda written: loop_calls.post(service.on_layers, written),
                config=self._loop_config(),
            )
            self.metrics.step_loop_stalled.set_function(lambda: self.step_loop.stalled_s)
            self._loop.start()
            if self.model.rank_group is not None:
                self.model.rank_group.watch(die)
            try:
                await self.run(lambda: warm_up(self.model, max_prompt_tokens=self.config.max_prompt_tokens))
                yield fatal
            finally:
                if self.model.rank_group is not None:
                    self.model.rank_group.watch(lambda error: None)
                await asyncio.to_thread(self._loop.stop)

    def show_role(self, service: TierService) -> None:
        """Has metrics show the present role, and what follows from it."""
        self.steps.itl_budget_s = service.itl_budget_s
        self.metrics.max_num_seqs.set(service.max_num_seqs)
        self.metrics.set_role(self.tier)

    def _loop_config(self) -> LoopConfig:
        """C++ kernels have threads of their own, pinned to the other cores, which torch's threads would slow down."""
        own = config_of_rank(self.config, 0, num_cores=num_cores())
        cpus, threads = own.cpus, own.threads or len(own.cpus) or num_cores()
        if self.model.kernels.backend is Backend.CPU:
            cpus, threads = cpus[:1], 1
        config = LoopConfig(compute_cpus=cpus or None, num_threads=threads, name=f"{self.tier}-step")
        leases = self.model.core_leases
        return config if leases is None else replace(config, on_busy=leases.set_busy)

    def kv_use(self) -> KvUse:
        """What decides when the KV cache is populated. Neither this nor its functions are called before `computing`."""
        leases, loop, calls = self.model.core_leases, self.step_loop, self.calls
        return KvUse(
            is_busy=lambda: calls.count > 0 or loop.is_awake or (leases is not None and leases.is_any_busy()),
            cpus=self.config.cpus,
        )

    @property
    def is_hung(self) -> bool:
        """Whether the step thread has made no progress for much longer than its steps take."""
        return is_hung(self.step_loop, longest_step_s=self.steps.longest_step_s)

    @property
    def step_loop(self) -> StepLoop:
        """The loop of the step thread. It exists from `computing` on."""
        assert self._loop is not None, "the step loop runs before requests are served"
        return self._loop

    @property
    def load(self) -> Load:
        """The load as last reported by the step thread."""
        return self.steps.load
