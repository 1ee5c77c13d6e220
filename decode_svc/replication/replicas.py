"""Copies of running requests' blocks at another decode worker, where the requests go on if this worker is lost. Pure.

A copy is a block of the other worker's prefix cache like any other: it may be late, missing or evicted. A block without
a copy is computed again, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from decode_svc.request import DecodePhase, ScheduledRequest
from pdserve.base.errors import NoFreeBlocks, StaleError
from pdserve.base.ids import AttemptId, BlockHash, BlockId, RequestId
from pdserve.engine.block_manager import BlockManager

#: Maximum number of blocks in one transfer, and share of a worker's blocks that all transfers into it may hold.
MAX_BLOCKS = 256
_MAX_SHARE = 1 / 16


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Blocks to copy, each with a reference that `Replicas.let_go` takes back; predecessors come first."""

    hashes: list[BlockHash]
    blocks: list[BlockId]
    #: Number of leading blocks of each choice that the other worker has once this batch has arrived.
    offered: Mapping[tuple[AttemptId, int], int]


@dataclass(frozen=True, slots=True)
class CopySpace:
    """Indices of the blocks that are missing here, and the blocks of this worker that their copies go to."""

    missing: list[int]
    blocks: list[BlockId]
    #: Whether more blocks are missing, for which this worker has no room.
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class _Incoming:
    """Copies on their way to this worker."""

    hashes: list[BlockHash]
    blocks: list[BlockId]


class Replicas:
    """Both ends of copies. Changes blocks only between steps, as all commands do."""

    def __init__(
        self,
        requests: Mapping[RequestId, ScheduledRequest],
        blocks: BlockManager,
        on_freed: Callable[[], None],
    ) -> None:
        """`on_freed` is called when blocks may be free that a request here waits for."""
        self._requests = requests
        self._blocks = blocks
        self._on_freed = on_freed
        #: Number of leading blocks of each choice that the other worker has, by request.
        self._offered: dict[AttemptId, dict[int, int]] = {}
        self._leaving: list[CopyBatch] = []
        self._arriving: dict[RequestId, _Incoming] = {}

    @property
    def held(self) -> Iterator[list[BlockId]]:
        """The blocks that transfers hold."""
        for batch in self._leaving:
            yield batch.blocks
        for intake in self._arriving.values():
            yield intake.blocks

    @property
    def num_used(self) -> int:
        """Blocks of output that continued requests have found here since the start."""
        return self._blocks.num_reused_blocks

    # At the worker that runs the requests.
    def running(self) -> list[AttemptId]:
        """The requests whose blocks other workers can use, in the order of arrival."""
        if self._blocks.pool.windows != (None,):
            return []
        return [
            request.attempt_id
            for request in self._requests.values()
            if request.phase is DecodePhase.RUNNING and not request.is_isolated
        ]

    def take(self, attempts: Collection[AttemptId]) -> CopyBatch:
        """Full blocks of these requests that were not offered yet, as many as fit into one transfer.

        A request that is over, or waits for blocks, has none.
        """
        found, offered = dict[BlockHash, BlockId](), dict[tuple[AttemptId, int], int]()
        for attempt_id in attempts:
            request = self._requests.get(attempt_id.request_id)
            if request is None or request.attempt_id != attempt_id or request.phase is not DecodePhase.RUNNING:
                continue
            known = self._offered.get(attempt_id, {})
            for choice, sequence in request.sequences.items():
                first = known.get(choice, 0)
                stop = min(sequence.num_registered, first + MAX_BLOCKS - len(found))
                for index in range(first, stop):
                    found[sequence.hashes[index]] = BlockId(sequence.block_table[index])
                if stop > first:
                    offered[attempt_id, choice] = stop
        batch = CopyBatch(list(found), list(found.values()), offered)
        self._blocks.pool.share(batch.blocks)
        self._leaving.append(batch)
        return batch

    def let_go(self, batch: CopyBatch, there: Collection[AttemptId]) -> None:
        """Nothing reads the blocks any more. `there`: requests whose blocks have arrived at their target.

        Blocks of all other requests are copied again.
        """
        self._leaving.remove(batch)
        self._free(batch.blocks)
        for (attempt_id, choice), count in batch.offered.items():
            request = self._requests.get(attempt_id.request_id)
            if attempt_id in there and request is not None and request.attempt_id == attempt_id:
                self._offered.setdefault(attempt_id, {})[choice] = count

    def forget(self, attempt_id: AttemptId) -> None:
        """The request is over, or its copies go to another worker, which has none yet."""
        self._offered.pop(attempt_id, None)

    # At the worker that the copies go to.
    def reserve(self, name: RequestId, hashes: Items[BlockHash]) -> CopySpace:
        """Blocks for those of the hashes that are not cached here, held until `arrived` or `drop`.

        Raises `NoFreeBlocks` when this worker needs all its blocks itself, `StaleError` for a name that is in use.
        """
        if name in self._arriving:
            raise StaleError(f"Copies named {name} are on their way already.")
        pool = self._blocks.pool
        missing = [index for index, each in enumerate(hashes) if not pool.count_prefix((each,))]
        if not missing:
            return CopySpace([], [])
        # Blocks that sequences here take soon stay free: a copy must not cost a preemption.
        share = max(1, int(_MAX_SHARE * pool.num_blocks))
        room = min(share - sum(len(intake.blocks) for intake in self._arriving.values()), pool.num_free - share)
        blocks = pool.allocate(min(room, len(missing))) if room > 0 else None
        if not blocks:
            raise NoFreeBlocks(f"This worker has no blocks to spare for {len(missing)} copies.")
        chosen = missing[: len(blocks)]
        self._arriving[name] = _Incoming([hashes[index] for index in chosen], blocks)
        return CopySpace(chosen, blocks, is_partial=len(chosen) < len(missing))

    def arrived(self, name: RequestId) -> None:
        """The blocks of these copies are verified: from now on the prefix cache has them."""
        intake = self._arriving.pop(name)
        for block, block_hash in zip(intake.blocks, intake.hashes, strict=True):
            self._blocks.pool.register(block, block_hash)
        self._free(intake.blocks)

    def drop(self, name: RequestId) -> None:
        """The copies will not arrive, and nothing writes to their blocks any more. No effect on an unknown name."""
        if (intake := self._arriving.pop(name, None)) is not None:
            self._free(intake.blocks)

    def _free(self, blocks: list[BlockId]) -> None:
        self._blocks.pool.release(reversed(blocks))
        self._on_freed()
