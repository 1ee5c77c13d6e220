"""Rank 0's side of steps and block copies: it sends each one to its followers, which carry it out as well.

A step's batch goes to all followers before rank 0 starts it. All ranks therefore launch the same kernels in the same
order, and they exchange results in `kernels.ranks.TorchRanks`. Blocks that are handed over pass through the stage, to
and from which every rank copies its own heads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.decoder import LayerListener
from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.memory import Bundle, MessageSpec
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.tasks import run_to_completion
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import RecordNext, StepCache, StepDecoder, TokenSampler
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.model.batch import Batch
from pdserve.worker.kv_bytes.host_blocks import CacheCopies
from pdserve.worker.kv_bytes.stage import Stage
from pdserve.worker.ranks.messages import CopyRequest, MessageKind, StepPosition, StepWriter

#: Free memory of a device below which no further graphs are recorded: many times what one of them takes.
_MIN_FREE_BYTES = 512 << 20


class Followers(Protocol):
    """The other ranks, as `pdserve.worker.ranks.processes.RankProcesses` has them."""

    @property
    def steps(self) -> Sequence[socket.socket]:
        """One socket per follower, for steps."""

    def check(self) -> None:
        """Raises `PeerLost` when a follower has ended."""

    async def request_copy(self, request: bytes) -> None:
        """Returns when every follower has made the copy, or never will. Raises `PeerLost`."""


class Rank0:
    """Numbers steps, sends them to the followers, and keeps track of how far rank 0 is."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._steps = StepWriter(followers.steps)
        self._number = 0
        #: The last step whose result rank 0 has seen.
        self._ended = 0

    # The step thread.
    def decoder(self, own: StepDecoder) -> StepDecoder:
        """A decoder that has all ranks compute."""
        return _AllRanksDecoder(self, own)

    def sampler(self, own: TokenSampler) -> TokenSampler:
        """A sampler whose results mark the end of a step."""
        return _WatchedSampler(self, own)

    def cache(self, own: KvCache) -> StepCache:
        """A cache whose copies include the blocks of all ranks."""
        return _AllRanksCache(self, own)

    def record_next(self, own: RecordNext, free_memory: Callable[[], int]) -> RecordNext:
        """Records graphs on all ranks, which must have the same ones: a rank that lacks memory ends the worker.

        `free_memory`, in bytes: of rank 0's device. All ranks have about as much. Graphs that can wait are not recorded
        where little is left.
        """

        def record(is_idle: bool) -> bool:
            if is_idle and free_memory() < _MIN_FREE_BYTES:
                return False
            self._number += 1
            self._steps.record(self._number, is_idle=is_idle)
            try:
                return own(is_idle)
            except torch.OutOfMemoryError as error:
                raise RuntimeError(f"No memory for a graph of rank 0: {error}") from error

        return record

    def start_copies(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Has the followers copy their blocks."""
        self._number += 1
        self._steps.copy_blocks(self._number, pairs)

    def start_forward(self, batch: Batch, *, reports_layers: bool) -> None:
        """Has the followers compute the batch."""
        self._number += 1
        self._steps.forward(self._number, batch, reports_layers=reports_layers)

    @property
    def number(self) -> int:
        """Number of the step that was started last."""
        return self._number

    def record_end(self) -> None:
        """Every started step has ended. Raises `PeerLost`: on GPUs, a step that lost a rank ends with garbage."""
        self._followers.check()
        self._ended = self._number

    # The event loop.
    @property
    def ended(self) -> StepPosition:
        """The last position whose result rank 0 has seen."""
        return StepPosition(self._ended)

    async def copy_on_followers(self, kind: MessageKind, copy: CopyRequest) -> None:
        """Has the followers copy. Raises `PeerLost`."""
        await self._followers.request_copy(copy.encode(kind))


class _AllRanksDecoder:
    def __init__(self, rank0: Rank0, decoder: StepDecoder) -> None:
        self._rank0 = rank0
        self._decoder = decoder

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self._rank0.start_forward(batch, reports_layers=on_layer is not None)
        return self._decoder.forward(batch, kv_cache, on_layer)


class _AllRanksCache:
    """Implements `pdserve.engine.runner.StepCache`."""

    def __init__(self, rank0: Rank0, own: KvCache) -> None:
        self._rank0 = rank0
        self._own = own
        self.tensor = own.tensor
        self.layout = own.layout

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._rank0.start_copies(pairs)
        self._own.copy_blocks(pairs)

    def record_event(self, num_layers: int) -> RankEvent:
        return RankEvent(StepPosition(self._rank0.number, num_layers), self._own.record_event(num_layers))


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event on rank 0, with the position that the followers have to reach."""

    position: StepPosition
    own: DeviceEvent | None

    def wait(self) -> None:
        """Waits for the event on rank 0, as `DeviceEvent.wait` does."""
        if self.own is not None:
            self.own.wait()


class _WatchedSampler:
    def __init__(self, rank0: Rank0, sampler: TokenSampler) -> None:
        self._rank0 = rank0
        self._sampler = sampler

    def sample(self, logits: Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> list[SampleResult]:
        results = self._sampler.sample(logits, rows, logits_rows)
        self._rank0.record_end()
        return results

    def wait_for_step(self) -> None:
        self._sampler.wait_for_step()
        self._rank0.record_end()


class RankCopies:
    """Implements `BlockCopies` of kvtransfer: a block is complete once every rank has copied its heads."""

    digest = HOST_DIGEST

    def __init__(self, rank0: Rank0, own: KvCache, stage: Stage) -> None:
        self._rank0 = rank0
        self._own = CacheCopies(own, stage, is_whole=False)
        self._stage = stage

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        assert spec.after is None or isinstance(spec.after, RankEvent)
        position = self._rank0.ended if spec.after is None else spec.after.position
        copy = CopyRequest(bundles=bundles, slots=slots, layers=spec.layers, after=position)
        followers = self._rank0.copy_on_followers(MessageKind.READ_BLOCKS, copy)
        await self._all(self._own.read(bundles, slots, spec), followers)
        return await self._digests(bundles, slots, spec)

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        copy = CopyRequest(bundles=bundles, slots=slots, layers=spec.layers, after=self._rank0.ended)
        followers = self._rank0.copy_on_followers(MessageKind.WRITE_BLOCKS, copy)
        await self._all(self._own.write(bundles, slots, spec), followers)
        return await self._digests(bundles, slots, spec)

    async def _digests(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        return await run_to_completion(asyncio.to_thread(self._stage.digests, bundles, slots, spec))

    async def _all(self, own: Awaitable[list[bytes]], followers: Awaitable[None]) -> None:
        outcomes = await run_to_completion(asyncio.gather(own, followers, return_exceptions=True))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
