"""Both tiers' services over one engine. One of them takes requests, and the other one finishes those that it has."""

from __future__ import annotations

import asyncio

import grpc

from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeService
from pdserve.base.errors import PdserveError, SetupError
from pdserve.engine.running import RunningLimits
from pdserve.engine.shared import SharedScheduler
from pdserve.engine.step import LayersWritten, StepOutput
from pdserve.peers.workers import Tier
from pdserve.worker.serve.worker import TierService, Worker
from prefill_svc.service import PrefillService


class RolesService:
    """Implements `pdserve.worker.serve.worker.TierService` for the role that the worker has at the time."""

    def __init__(self, worker: Worker, config: DecodeConfig) -> None:
        """Raises: SetupError for a worker that cannot serve both tiers."""
        if not config.device.startswith("cpu") or config.tensor_parallel_size > 1 or config.transport != "ucx":
            raise SetupError(
                f"Workers with --device {config.device}, --tensor-parallel-size {config.tensor_parallel_size} and "
                f"--transport {config.transport} cannot change their role: that takes one rank on a CPU, and ucx. "
                f"Start it as python -m {worker.tier}_svc."
            )
        prefill, decode = PrefillService(worker, config), DecodeService(worker, config)
        self._services: dict[Tier, TierService] = {"prefill": prefill, "decode": decode}
        self._worker = worker
        self._role: Tier = worker.tier
        #: Waits for the end of the requests of the former role.
        self._leaving: asyncio.Task[None] | None = None
        pool = worker.model.pool
        limits = RunningLimits(
            max_num_seqs=config.max_decoding,
            max_num_batched_tokens=config.max_prompt_tokens,
            itl_budget_s=config.itl_budget_ms / 1000,
            min_prefill_tokens=min(pool.block_size, config.max_prompt_tokens),
        )
        self.scheduler = SharedScheduler(pool, prefill=prefill.scheduler, decode=decode.scheduler, limits=limits)
        worker.home_tier = worker.tier
        worker.calls.accept_only(worker.tier)

    # TierService
    @property
    def name(self) -> str:
        """That of the present tier's service."""
        return self._present.name

    @property
    def max_num_seqs(self) -> int:
        """That of the present tier."""
        return self._present.max_num_seqs

    @property
    def itl_budget_s(self) -> float | None:
        """That of the present tier."""
        return self._present.itl_budget_s

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the gRPC methods of both tiers."""
        for service in self._services.values():
            service.register(server)

    async def start(self, grpc_address: str) -> str:
        """Opens both services. Returns the address for streams of the decode tier."""
        await self._services["prefill"].start(grpc_address)
        return await self._services["decode"].start(grpc_address)

    def on_step(self, output: StepOutput) -> None:
        """Passes a step's events to the tier whose step it was."""
        self._services[output.events.tier].on_step(output)

    def on_layers(self, written: LayersWritten) -> None:
        """Passes a report to the prefill tier, which alone requests any."""
        self._services["prefill"].on_layers(written)

    def drain(self, within_s: float) -> None:
        """Drains both tiers."""
        for service in self._services.values():
            service.drain(within_s)

    def stay(self) -> None:
        """Takes back `drain`. What the worker has from its former role may stay, too."""
        for service in self._services.values():
            service.stay()

    async def rebalance(self, num_sequences: int) -> int:
        """Asks requests of the present tier to move."""
        return await self._present.rebalance(num_sequences)

    def take_role(self, tier: Tier) -> None:
        """Prompts that are here are computed and sent. Decode requests that would take long move, where they can."""
        if self._leaving is not None:
            self._leaving.cancel()
        former, self._role = self._role, tier
        self._services[tier].stay()
        # A prefill service that drains would hand back prompts, which are as well computed here.
        if former == "decode":
            self._services[former].drain(self._worker.config.drain_timeout_s)
        self._leaving = self._worker.tasks.start(self._leave(former), name="leave-role")

    def give_up(self, error: PdserveError) -> None:
        """Ends the requests of both tiers with this error."""
        for service in self._services.values():
            service.give_up(error)

    def end_idle(self) -> None:
        """Ends those of both tiers."""
        for service in self._services.values():
            service.end_idle()

    async def close(self) -> None:
        """Closes both services, the one that sends first."""
        for service in self._services.values():
            await service.close()

    async def _leave(self, former: Tier) -> None:
        await self._worker.calls.wait_idle_of(former)
        self._services[former].stay()  # Nothing is left to look for.

    @property
    def _present(self) -> TierService:
        return self._services[self._role]
