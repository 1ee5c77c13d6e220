"""Random operations on a small pool, compared with a simple model: no block leaks or is allocated twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.base.block_hash import hash_blocks
from pdserve.base.ids import BlockHash, BlockId
from pdserve.engine.block_pool import BlockPool
from tests.support.depth import IS_FULL

NUM_BLOCKS = 7
BLOCK_SIZE = 2
KEY = bytes(32)
#: Few distinct tokens, so that prefixes coincide.
contents = st.lists(st.integers(0, 1), min_size=0, max_size=NUM_BLOCKS * BLOCK_SIZE)


class Holder:
    """A block table of a KV group, and the hashes that its full blocks should have."""

    def __init__(self, group: int, blocks: list[BlockId], hashes: list[BlockHash], num_registered: int) -> None:
        self.group = group
        self.blocks = blocks
        self.hashes = hashes
        self.num_registered = num_registered


class PoolMachine(RuleBasedStateMachine):
    #: Windows of the KV groups.
    windows: tuple[int | None, ...] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, self.windows)
        self.holders: list[Holder] = []
        self.retained: list[list[BlockHash]] = []
        #: Matchable hashes of the first group according to the pool's events.
        self.mirror: set[BlockHash] = set()

    @rule(data=st.data(), tokens=contents, spare=st.integers(0, 2))
    def hold(self, data: st.DataObject, tokens: list[int], spare: int) -> None:
        group = data.draw(st.integers(0, len(self.windows) - 1))
        hashes = hash_blocks(KEY, tokens, BLOCK_SIZE)
        free_before = self.pool.num_free
        known = self.pool.count_prefix(hashes, group)
        matched = self.pool.match_prefix(hashes, group)
        assert len(matched) == known
        of_others = {block for holder in self.holders if holder.group != group for block in holder.blocks}
        assert not of_others.intersection(matched), "a block of another group was matched"
        fresh = self.pool.allocate(self.pool.blocks_for(len(tokens)) - len(matched) + spare)
        if fresh is None:
            self.pool.release(reversed(matched))
            assert self.pool.num_free == free_before
            return
        assert not {*matched} & {*fresh}
        assert all(self.pool.ref_count(block) == 1 for block in fresh)
        self.holders.append(Holder(group, [*matched, *fresh], hashes, len(matched)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register_next(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.num_registered < len(holder.hashes):
            index, group = holder.num_registered, holder.group
            is_canonical = self.pool.register(holder.blocks[index], holder.hashes[index], group)
            assert self.pool.count_prefix([holder.hashes[index]], group) == 1
            if is_canonical:
                (found,) = self.pool.match_prefix([holder.hashes[index]], group)
                assert found == holder.blocks[index]
                self.pool.release([found])
            holder.num_registered += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.share(holder.blocks)
        self.holders.append(Holder(holder.group, list(holder.blocks), holder.hashes, len(holder.hashes)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def write_last(self, data: st.DataObject) -> None:
        """Write to a holder's last block if it is partial."""
        holder = data.draw(st.sampled_from(self.holders))
        if len(holder.blocks) <= len(holder.hashes):
            return
        shared = self.pool.ref_count(holder.blocks[-1]) > 1
        free_before = self.pool.num_free
        own = self.pool.copy_on_write(holder.blocks[-1])
        if not shared:
            assert own == holder.blocks[-1]
        elif own is None:
            assert free_before == 0
        else:
            assert self.pool.drain_copies() == ((holder.blocks[-1], own),)
            holder.blocks[-1] = own

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(reversed(holder.blocks))

    @rule(tokens=contents)
    def retain(self, tokens: list[int]) -> None:
        self.retained.append(hash_blocks(KEY, tokens, BLOCK_SIZE))
        self.pool.retain(self.retained[-1])

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def end_retention(self, data: st.DataObject) -> None:
        self.pool.end_retention(self.retained.pop(data.draw(st.integers(0, len(self.retained) - 1))))

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def evict(self) -> None:
        """What is retained is evicted when nothing else is left."""
        everything = [hash_ for by_hash in self.pool._by_hash for hash_ in by_hash]
        found = {
            each: [self.pool.count_prefix([each], group) for group in range(len(self.windows))] for each in everything
        }
        taken = self.pool.allocate(1)
        assert taken is not None
        retained = {block_hash for hashes in self.retained for block_hash in hashes}
        lost = [
            each
            for each in everything
            if [self.pool.count_prefix([each], group) for group in range(len(self.windows))] != found[each]
        ]
        if retained.intersection(lost):
            assert not self.pool._cached
            assert not self.pool._uncached
        self.pool.release(taken)

    @rule()
    def listen(self) -> None:
        events = self.pool.drain_events()
        assert not self.mirror & {*events.added}
        assert {*events.removed} <= self.mirror
        self.mirror = (self.mirror | {*events.added}) - {*events.removed}
        known = {block_hash for holder in self.holders for block_hash in holder.hashes}
        matchable = {each for each in self.mirror | known if self.pool.count_prefix([each])}
        assert self.mirror == matchable

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        self.pool.check_integrity(holder.blocks for holder in self.holders)
        used = {block for holder in self.holders for block in holder.blocks}
        assert self.pool.num_free == NUM_BLOCKS - len(used)
        assert self.pool.num_retained == len({block_hash for hashes in self.retained for block_hash in hashes})

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(reversed(holder.blocks))
        for hashes in self.retained:
            self.pool.end_retention(hashes)
        assert self.pool.num_free == NUM_BLOCKS
        assert not self.pool.num_retained
        self.pool.check_integrity([])


class TwoGroupsMachine(PoolMachine):
    """Two KV groups share the blocks; the same tokens have the same hash in both."""

    windows = (None, 3)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40)

TestTwoGroups = TwoGroupsMachine.TestCase
TestTwoGroups.settings = settings(max_examples=400 if IS_FULL else 25, stateful_step_count=40)
