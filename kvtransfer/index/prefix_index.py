"""The prefix index: a map from block hashes to the workers that hold them, updated by events. Pure.

Each worker has a bit. A block's holders are then one integer, and a prompt costs one lookup per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.base.ids import BlockHash, Epoch, WorkerId


class KvEventKind(StrEnum):
    """Kind of a change to a worker's blocks."""

    #: This incarnation now holds `added` and nothing else; it replaces any other incarnation.
    RESET = "reset"
    #: This incarnation now also holds `added`, and no longer `removed`.
    DELTA = "delta"
    #: This incarnation shut down.
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """A change of the blocks one incarnation of a worker can serve; `added` and `removed` are disjoint."""

    worker_id: WorkerId
    epoch: Epoch
    kind: KvEventKind
    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


@dataclass(slots=True)
class _Holder:
    epoch: Epoch
    bit: int
    hashes: set[BlockHash] = field(default_factory=set)


class PrefixIndex:
    """Block hash -> workers.

    An incarnation is current from its RESET on. Events of any other are ignored, so dead epochs need no bookkeeping.
    """

    def __init__(self, *, max_entries: int = 4_000_000) -> None:
        """`max_entries` bounds the (worker, block) pairs; more are dropped, which only costs cache hits."""
        self._max_entries = max_entries
        self._holders: dict[WorkerId, _Holder] = {}
        self._masks: dict[BlockHash, int] = {}
        self._worker_of_bit: dict[int, WorkerId] = {}
        self._entries = 0
        #: Number of pairs dropped because the index was full.
        self.dropped = 0
        #: Number of events of incarnations that were not current.
        self.ignored = 0

    @property
    def entries(self) -> int:
        """Number of (worker, block) pairs."""
        return self._entries

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks."""
        return len(self._masks)

    def epochs(self) -> dict[WorkerId, Epoch]:
        """The current incarnation of each worker."""
        return {worker_id: holder.epoch for worker_id, holder in self._holders.items()}

    def block_counts(self) -> dict[WorkerId, int]:
        """Number of blocks of each worker."""
        return {worker_id: len(holder.hashes) for worker_id, holder in self._holders.items()}

    def blocks_of(self, worker_id: WorkerId) -> frozenset[BlockHash]:
        """All blocks of a worker; empty for an unknown one."""
        holder = self._holders.get(worker_id)
        return frozenset(holder.hashes) if holder else frozenset()

    def apply(self, event: KvEvent) -> None:
        """Applies an event. Applying the end of a history again changes nothing."""
        holder = self._holders.get(event.worker_id)
        if event.kind is KvEventKind.RESET:
            self._forget(event.worker_id)
            self._add(self._join(event.worker_id, event.epoch), event.added)
        elif holder is None or holder.epoch != event.epoch:
            self.ignored += 1
        elif event.kind is KvEventKind.GONE:
            self._forget(event.worker_id)
        else:
            self._remove(holder, event.removed)
            self._add(holder, event.added)

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Drops an incarnation and its blocks, if it is the current one."""
        holder = self._holders.get(worker_id)
        if holder is not None and holder.epoch == epoch:
            self._forget(worker_id)

    def overlap(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Number of leading blocks that each worker holds; workers without the first are left out.

        Stops at the first block that no worker holds.
        """
        if not hashes:
            return {}
        leading: dict[WorkerId, int] = {}
        remaining = self._masks.get(hashes[0], 0)
        for held, block_hash in enumerate(hashes):
            ending = remaining & ~self._masks.get(block_hash, 0)
            if ending:
                self._set_overlap(ending, held, leading)
                remaining ^= ending
            if not remaining:
                return leading
        self._set_overlap(remaining, len(hashes), leading)
        return leading

    def _set_overlap(self, mask: int, held: int, leading: dict[WorkerId, int]) -> None:
        """Sets the overlap of every worker in the mask to `held`."""
        while mask:
            bit = mask & -mask
            leading[self._worker_of_bit[bit]] = held
            mask ^= bit

    def _join(self, worker_id: WorkerId, epoch: Epoch) -> _Holder:
        bit = 1
        while bit in self._worker_of_bit:
            bit <<= 1
        self._worker_of_bit[bit] = worker_id
        self._holders[worker_id] = _Holder(epoch, bit)
        return self._holders[worker_id]

    def _forget(self, worker_id: WorkerId) -> None:
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._remove(holder, tuple(holder.hashes))
            del self._worker_of_bit[holder.bit]

    def _add(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        for position, block_hash in enumerate(hashes):
            if block_hash in holder.hashes:
                continue
            if self._entries >= self._max_entries:
                self.dropped += len(hashes) - position
                return
            holder.hashes.add(block_hash)
            self._masks[block_hash] = self._masks.get(block_hash, 0) | holder.bit
            self._entries += 1

    def _remove(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            if block_hash not in holder.hashes:
                continue
            holder.hashes.discard(block_hash)
            self._entries -= 1
            mask = self._masks[block_hash] & ~holder.bit
            if mask:
                self._masks[block_hash] = mask
            else:
                del self._masks[block_hash]
