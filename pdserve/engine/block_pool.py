"""Allocation of KV blocks: reference counts, the hash -> block maps of reusable prefixes, eviction of the oldest.

Pure bookkeeping on block ids; the bytes are in `kv_cache.KvCache`. Running out of blocks is a value (`None`), misuse
is an assertion. A free block is uncached (it never had reusable content, or lost it) or cached:

    uncached  --allocate-->  held (ref_count >= 1)  --release, no hash-->  uncached
                               |         ^
                  release, has a hash    | match_prefix
                               v         |
                             cached (ref_count 0, can be matched)  --allocate, no uncached left-->  held, hash forgotten

Cached blocks under a retained hash are evicted after all others.

A block holds tokens of one KV group of the layout. All groups take their blocks here, and each has a hash map of its
own: the same tokens have the same hash in every group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile

from pdserve.base.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents:
    """Net change of the set of the first KV group's matchable hashes since the last drain."""

    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


class BlockPool:
    """Allocates block ids `0 .. num_blocks-1`. Not thread-safe: used on the step thread only."""

    def __init__(self, num_blocks: int, block_size: int, windows: Items[int | None] = (None,)) -> None:
        """`windows`: of each KV group, as in `KvLayout`."""
        assert num_blocks > 0, f"a pool needs at least one block, got {num_blocks}"
        assert block_size > 0, f"a block holds at least one token, got {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        #: KV group of each block that has a hash.
        self._group_of = [0] * num_blocks
        self._by_hash: list[dict[BlockHash, BlockId]] = [{} for _ in self.windows]
        #: Free, without reusable content. A stack: the block released last is the likeliest to be in the CPU's cache.
        self._uncached = [BlockId(block) for block in reversed(range(num_blocks))]
        #: Free but still matchable, the least recently used first.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        #: The same under retained hashes, and how often each of these is retained.
        self._retained: OrderedDict[BlockId, None] = OrderedDict()
        self._retentions: dict[BlockHash, int] = {}
        self._copies: list[tuple[BlockId, BlockId]] = []
        self._added: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return, cached ones included."""
        return len(self._uncached) + len(self._cached) + len(self._retained)

    @property
    def num_retained(self) -> int:
        """Retained hashes, whether blocks are registered under them or not."""
        return len(self._retentions)

    def ref_count(self, block: BlockId) -> int:
        """Number of block tables that hold the block."""
        return self._refs[block]

    @property
    def num_groups(self) -> int:
        """KV groups, each of which has a table of blocks per sequence."""
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one KV group: the length of a table."""
        return -(-num_tokens // self.block_size)

    def blocks_of_all_groups_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens in every KV group."""
        return self.blocks_for(num_tokens) * len(self.windows)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each and undefined content; None, and no change, when too few are free.

        Takes uncached blocks first, then evicts the least recently used cached ones, those under retained hashes last.
        """
        if count > self.num_free:
            return None
        return [self._take_free() for _ in range(count)]

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each of these held blocks."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free: only a held block can be shared"
            self._refs[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Drop one reference to each. Pass a block table back to front, so that its tail is evicted before its head."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is released but has no holder"
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            block_hash = self._hash_of[block]
            if block_hash is None:
                self._uncached.append(block)
            elif block_hash in self._retentions:
                self._retained[block] = None
            else:
                self._cached[block] = None

    def retain(self, hashes: Items[BlockHash]) -> None:
        """Evict the blocks of all KV groups under a prompt's hashes after all others, until `end_retention`.

        May be called several times for a hash. It stays retained while no block is registered under it.
        """
        for block_hash in reversed(hashes):  # As in `release`.
            self._retentions[block_hash] = self._retentions.get(block_hash, 0) + 1
            self._move_free(block_hash, self._cached, self._retained)

    def end_retention(self, hashes: Items[BlockHash]) -> None:
        """Take one `retain` of each hash back. Free blocks that no other one keeps count as just used."""
        for block_hash in reversed(hashes):
            left = self._retentions[block_hash] - 1
            if left:
                self._retentions[block_hash] = left
            else:
                del self._retentions[block_hash]
                self._move_free(block_hash, self._retained, self._cached)

    def count_prefix(self, hashes: Iterable[BlockHash], group: int = 0) -> int:
        """Number of blocks that `match_prefix` would find; takes no references."""
        return sum(1 for _ in takewhile(self._by_hash[group].__contains__, hashes))

    def match_prefix(self, hashes: Iterable[BlockHash], group: int = 0) -> list[BlockId]:
        """A KV group's blocks of the longest cached prefix of `hashes`, with a reference taken on each."""
        matched: list[BlockId] = []
        by_hash = self._by_hash[group]
        for block_hash in hashes:
            block = by_hash.get(block_hash)
            if block is None:
                break
            if not self._refs[block]:
                del (self._retained if block in self._retained else self._cached)[block]
            self._refs[block] += 1
            matched.append(block)
        return matched

    def register(self, block: BlockId, block_hash: BlockHash, group: int = 0) -> bool:
        """Make a full, computed (or verified) block of a KV group matchable. From now on its content must not change.

        False when another block is already registered under this hash. That one stays canonical; this one, equal in
        content, stays private to its holders and becomes uncached when they release it.
        """
        assert self._refs[block] > 0, f"block {block} is free: only its holder can register it"
        known = self._hash_of[block]
        assert known is None or (known, self._group_of[block]) == (block_hash, group), (
            f"block {block} is already registered under another hash or KV group"
        )
        if self._by_hash[group].setdefault(block_hash, block) != block:
            return False
        if known is None:
            self._hash_of[block] = block_hash
            self._group_of[block] = group
            if group == 0 and self._removed.pop(block_hash, self) is self:
                self._added[block_hash] = None
        return True

    def copy_on_write(self, block: BlockId) -> BlockId | None:
        """A block that only the caller may write to, to replace `block`; None when a copy is needed and none is free.

        When there are other holders of `block`, the caller's reference moves to a fresh block, and the copy is queued
        for `drain_copies`.
        """
        assert self._hash_of[block] is None, f"block {block} is full and matchable: it is never written again"
        if self._refs[block] == 1:
            return block
        fresh = self.allocate(1)
        if fresh is None:
            return None
        self.release((block,))
        self._copies.append((block, fresh[0]))
        return fresh[0]

    def drain_copies(self) -> tuple[tuple[BlockId, BlockId], ...]:
        """(source, destination) pairs that must be copied, in this order, before the next forward pass writes."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def drain_events(self) -> CacheEvents:
        """The first KV group's hashes that became, or ceased to be, matchable since the last call."""
        events = CacheEvents(added=tuple(self._added), removed=tuple(self._removed))
        self._added.clear()
        self._removed.clear()
        return events

    def check_integrity(self, tables: Iterable[Iterable[BlockId]] | None = None) -> None:
        """Assert that every block is uncached, cached or held, exactly once, and that the hash maps agree.

        With `tables`, which must be all block tables, every reference count must also equal the number of holders.
        """
        held = {block for block in range(self.num_blocks) if self._refs[block] > 0}
        assert min(self._refs) >= 0, "a reference count is negative"
        states = Counter((*self._uncached, *self._cached, *self._retained, *held))
        assert len(states) == self.num_blocks, "a block is neither uncached, cached nor held"
        assert max(states.values()) == 1, "a block is in two states at once"
        hashed = {(self._group_of[b], h, b) for b, h in enumerate(self._hash_of) if h is not None}
        listed = {(group, *item) for group, by_hash in enumerate(self._by_hash) for item in by_hash.items()}
        assert hashed == listed, "hash maps disagree"
        assert all(self._hash_of[block] is None for block in self._uncached), "an uncached block has a hash"
        assert all(self._hash_of[block] is not None for block in self._cached), "a cached block has no hash"
        retained = {block for block in (*self._cached, *self._retained) if self._hash_of[block] in self._retentions}
        assert retained == {*self._retained}, "a free block is in the wrong order of eviction"
        if tables is not None:
            holders = Counter(block for table in tables for block in table)
            counted = {block: self._refs[block] for block in held}
            assert counted == dict(holders), f"reference counts {counted} but holders {dict(holders)}"

    def _take_free(self) -> BlockId:
        if self._uncached:
            block = self._uncached.pop()
        else:
            block, _ = (self._cached or self._retained).popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def _move_free(
        self, block_hash: BlockHash, source: OrderedDict[BlockId, None], target: OrderedDict[BlockId, None]
    ) -> None:
        for by_hash in self._by_hash:
            block = by_hash.get(block_hash)
            if block is not None and block in source:
                del source[block]
                target[block] = None

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"cached block {block} has no hash"
        self._hash_of[block] = None
        group = self._group_of[block]
        del self._by_hash[group][block_hash]
        if group == 0 and self._added.pop(block_hash, self) is self:
            self._removed[block_hash] = None
