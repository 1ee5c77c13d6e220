"""What rank 0 of several does so that the others do it, too: each step, and each copy of blocks.

A step's batch goes to all others before rank 0 begins with it, so all ranks launch the same kernels in the same order;
they meet in `kernels.ranks.TorchRanks`. Blocks that are handed over meet in the stage, to and from which every rank
copies its own heads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.decoder import LayerListener
from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.memory import Bundle, MessageSpec
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.tasks import to_its_end
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import StepCache, StepDecoder, TokenSampler
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.model.batch import Batch
from pdserve.worker.kv_bytes.host import CacheCopies
from pdserve.worker.kv_bytes.stage import Stage
from pdserve.worker.ranks.messages import CopyRequest, MessageKind, StepPosition, StepWriter


class Followers(Protocol):
    """The other ranks: `pdserve.worker.ranks.processes.RankProcesses`."""

    @property
    def steps(self) -> Sequence[socket.socket]:
        """Where steps are told, to each."""

    def check(self) -> None:
        """Raises `PeerLost` when one has ended."""

    async def ask(self, request: bytes) -> None:
        """Returns when all have done what was asked, or will not. Raises `PeerLost`."""


class Rank0:
    """How far steps are on rank 0, and what it tells the others. Numbers of steps are given here."""

    def __init__(self, others: Followers) -> None:
        self._others = others
        self._steps = StepWriter(others.steps)
        self._number = 0
        #: The last step whose result rank 0 has seen.
        self._ended = 0

    # The step thread.
    def decoder(self, own: StepDecoder) -> StepDecoder:
        """The decoder, with all ranks."""
        return _AllRanksDecoder(self, own)

    def sampler(self, own: TokenSampler) -> TokenSampler:
        """The sampler; from what it gives follows that a step has ended."""
        return _WatchedSampler(self, own)

    def cache(self, own: KvCache) -> StepCache:
        """The cache, with the blocks of all ranks."""
        return _AllRanksCache(self, own)

    def begin_copies(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Has the others copy their blocks."""
        self._number += 1
        self._steps.copy_blocks(self._number, pairs)

    def begin_forward(self, batch: Batch, *, notes_layers: bool) -> None:
        """Has the others compute it."""
        self._number += 1
        self._steps.forward(self._number, batch, notes_layers=notes_layers)

    @property
    def number(self) -> int:
        """Of the step that was begun last."""
        return self._number

    def note_end(self) -> None:
        """All that has begun has ended. Raises `PeerLost`: without a rank, a step on GPUs ends with rubbish."""
        self._others.check()
        self._ended = self._number

    # The event loop.
    @property
    def ended(self) -> StepPosition:
        """Rank 0 has seen the result of all steps up to here."""
        return StepPosition(self._ended)

    async def have_copied(self, kind: MessageKind, copy: CopyRequest) -> None:
        """Has the others copy. Raises `PeerLost`."""
        await self._others.ask(copy.encode(kind))


class _AllRanksDecoder:
    def __init__(self, lead: Rank0, decoder: StepDecoder) -> None:
        self._lead = lead
        self._decoder = decoder

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self._lead.begin_forward(batch, notes_layers=on_layer is not None)
        return self._decoder.forward(batch, kv_cache, on_layer)


class _AllRanksCache:
    """Implements `pdserve.engine.runner.StepCache`."""

    def __init__(self, lead: Rank0, own: KvCache) -> None:
        self._lead = lead
        self._own = own
        self.tensor = own.tensor
        self.layout = own.layout

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self._lead.begin_copies(pairs)
        self._own.copy_blocks(pairs)

    def record_event(self, num_layers: int) -> RankEvent:
        return RankEvent(StepPosition(self._lead.number, num_layers), self._own.record_event(num_layers))


@dataclass(frozen=True, slots=True)
class RankEvent:
    """A moment of rank 0, and what the others have to have written by then."""

    mark: StepPosition
    own: DeviceEvent | None

    def wait(self) -> None:
        """As `DeviceEvent.wait`, of rank 0."""
        if self.own is not None:
            self.own.wait()


class _WatchedSampler:
    def __init__(self, lead: Rank0, sampler: TokenSampler) -> None:
        self._lead = lead
        self._sampler = sampler

    def sample(self, logits: Tensor, rows: Sequence[SampleRow], logits_rows: Sequence[int]) -> list[SampleResult]:
        results = self._sampler.sample(logits, rows, logits_rows)
        self._lead.note_end()
        return results

    def wait_for_step(self) -> None:
        self._sampler.wait_for_step()
        self._lead.note_end()


class RankCopies:
    """Implements `kvtransfer.handover.staging.BlockCopies`: a block is there when every rank has copied its heads."""

    digest = HOST_DIGEST

    def __init__(self, lead: Rank0, own: KvCache, stage: Stage) -> None:
        self._lead = lead
        self._own = CacheCopies(own, stage, is_whole=False)
        self._stage = stage

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        assert spec.after is None or isinstance(spec.after, RankEvent)
        mark = self._lead.ended if spec.after is None else spec.after.mark
        copy = CopyRequest(bundles=bundles, slots=slots, layers=spec.layers, after=mark)
        await self._all(self._own.read(bundles, slots, spec), self._lead.have_copied(MessageKind.READ_BLOCKS, copy))
        return await self._digests(bundles, slots, spec)

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        copy = CopyRequest(bundles=bundles, slots=slots, layers=spec.layers, after=self._lead.ended)
        await self._all(self._own.write(bundles, slots, spec), self._lead.have_copied(MessageKind.WRITE_BLOCKS, copy))
        return await self._digests(bundles, slots, spec)

    async def _digests(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        return await to_its_end(asyncio.to_thread(self._stage.digests, bundles, slots, spec))

    async def _all(self, own: Awaitable[list[bytes]], others: Awaitable[None]) -> None:
        outcomes = await to_its_end(asyncio.gather(own, others, return_exceptions=True))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
