"""The block pool: allocation, sharing, eviction, copy-on-write and events."""

from __future__ import annotations

import pytest

from pdserve.base.ids import BlockHash, BlockId
from pdserve.engine.block_pool import BlockPool, CacheEvents


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def held(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cached(pool: BlockPool, *numbers: int) -> list[BlockId]:
    """Makes free blocks that are matchable under these hashes, the least recently used first."""
    blocks = held(pool, len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.register(block, name(number))
        pool.release([block])
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 16)
    first = held(pool, 2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.release(first)
    assert len(set(held(pool, 3))) == 3
    pool.check_integrity()


def test_fresh_blocks_are_used_front_to_back_as_they_are_populated() -> None:
    pool = BlockPool(8, 16)
    first = held(pool, 3)
    assert first == [0, 1, 2]
    pool.release(first)
    assert held(pool, 4)[-1] == 3


def test_uncached_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3, 16)
    cached(pool, 1)
    held(pool, 2)
    assert pool.count_prefix([name(1)]) == 1
    held(pool, 1)
    assert pool.count_prefix([name(1)]) == 0


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3, 16)
    one, two, three = cached(pool, 1, 2, 3)
    pool.release(pool.match_prefix([name(1)]))
    assert held(pool, 3) == [two, three, one]


def test_the_tail_of_a_released_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 16)
    table = held(pool, 3)
    for number, block in enumerate(table):
        pool.register(block, name(number))
    pool.release(reversed(table))
    held(pool, 2)
    assert pool.match_prefix([name(0), name(1)]) == table[:1]


def test_a_match_ends_at_the_first_unknown_hash_and_takes_references() -> None:
    pool = BlockPool(4, 16)
    one, two, _ = cached(pool, 1, 2, 4)
    assert pool.match_prefix([name(1), name(2), name(3), name(4)]) == [one, two]
    assert [pool.ref_count(one), pool.ref_count(two), pool.num_free] == [1, 1, 2]
    assert pool.match_prefix([name(1)]) == [one]
    assert pool.ref_count(one) == 2
    pool.check_integrity([[one, two], [one]])


def test_counting_a_prefix_takes_no_references() -> None:
    pool = BlockPool(2, 16)
    (block,) = cached(pool, 1)
    assert pool.count_prefix([name(1), name(2)]) == 1
    assert pool.ref_count(block) == 0


def test_a_referenced_block_is_never_evicted() -> None:
    pool = BlockPool(2, 16)
    cached(pool, 1)
    (block,) = pool.match_prefix([name(1)])
    assert pool.allocate(2) is None
    assert held(pool, 1) != [block]


def test_an_unregistered_block_is_never_matched() -> None:
    pool = BlockPool(2, 16)
    held(pool, 1)
    assert pool.match_prefix([name(1)]) == []


def test_the_first_of_two_equal_blocks_stays_canonical() -> None:
    pool = BlockPool(3, 16)
    first, second = held(pool, 2)
    assert pool.register(first, name(1))
    assert not pool.register(second, name(1))
    assert pool.match_prefix([name(1)]) == [first]
    pool.release([second])
    pool.check_integrity([[first], [first]])
    pool.release([first, first])
    assert pool.num_free == 3
    assert pool.count_prefix([name(1)]) == 1
    pool.check_integrity([])


def test_an_equal_block_can_be_registered_once_the_canonical_one_is_gone() -> None:
    pool = BlockPool(2, 16)
    first, second = held(pool, 2)
    pool.register(first, name(1))
    pool.release([first])
    held(pool, 1)
    assert pool.register(second, name(1))


def test_registering_the_same_block_twice_changes_nothing() -> None:
    pool = BlockPool(2, 16)
    (block,) = held(pool, 1)
    assert pool.register(block, name(1))
    assert pool.register(block, name(1))
    assert pool.drain_events() == CacheEvents(added=(name(1),))


def test_a_single_holder_writes_in_place() -> None:
    pool = BlockPool(2, 16)
    (block,) = held(pool, 1)
    assert pool.copy_on_write(block) == block
    assert pool.drain_copies() == ()


def test_writing_a_shared_block_moves_one_holder_to_a_copy() -> None:
    pool = BlockPool(2, 16)
    (block,) = held(pool, 1)
    pool.share([block])
    own = pool.copy_on_write(block)
    assert own is not None
    assert own != block
    assert [pool.ref_count(block), pool.ref_count(own)] == [1, 1]
    assert pool.drain_copies() == ((block, own),)
    assert pool.drain_copies() == ()
    pool.check_integrity([[block], [own]])


def test_copy_on_write_without_a_free_block_is_none_and_changes_nothing() -> None:
    pool = BlockPool(1, 16)
    (block,) = held(pool, 1)
    pool.share([block])
    assert pool.copy_on_write(block) is None
    assert pool.ref_count(block) == 2
    assert pool.drain_copies() == ()


def test_events_are_the_net_change_since_the_last_drain() -> None:
    pool = BlockPool(2, 16)
    cached(pool, 1)
    assert pool.drain_events() == CacheEvents(added=(name(1),))
    blocks = held(pool, 2)  # Evicts 1.
    pool.register(blocks[0], name(2))
    pool.register(blocks[1], name(1))  # Adds it again.
    assert pool.drain_events() == CacheEvents(added=(name(2),))
    pool.release(blocks)
    held(pool, 2)
    assert pool.drain_events() == CacheEvents(removed=(name(2), name(1)))


def test_a_hash_added_and_removed_between_two_drains_is_not_reported() -> None:
    pool = BlockPool(1, 16)
    cached(pool, 1)
    held(pool, 1)
    assert pool.drain_events() == CacheEvents()


@pytest.mark.parametrize("misuse", ["release", "share", "register"])
def test_misuse_of_a_free_block_is_an_assertion(misuse: str) -> None:
    pool = BlockPool(1, 16)
    with pytest.raises(AssertionError, match="block 0"):
        {
            "release": lambda: pool.release([BlockId(0)]),
            "share": lambda: pool.share([BlockId(0)]),
            "register": lambda: pool.register(BlockId(0), name(1)),
        }[misuse]()


def test_writing_to_a_matchable_block_is_an_assertion() -> None:
    pool = BlockPool(1, 16)
    (block,) = held(pool, 1)
    pool.register(block, name(1))
    with pytest.raises(AssertionError, match="never written again"):
        pool.copy_on_write(block)


def test_integrity_fails_when_holders_and_references_differ() -> None:
    pool = BlockPool(2, 16)
    (block,) = held(pool, 1)
    pool.check_integrity([[block]])
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([[block], [block]])
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity([])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


def test_events_are_those_of_the_first_kv_group() -> None:
    """Both groups know the same tokens by the same hash; routers learn where the first one has them."""
    pool = BlockPool(3, 16, (None, 6))
    other, first, spare = held(pool, 3)
    pool.register(other, name(1), 1)
    assert pool.drain_events() == CacheEvents()
    pool.register(first, name(1), 0)
    pool.release([other, spare])
    held(pool, 2)
    assert pool.count_prefix([name(1)], 1) == 0
    assert pool.drain_events() == CacheEvents(added=(name(1),))
    pool.release([first])
    held(pool, 1)
    assert pool.drain_events() == CacheEvents(removed=(name(1),))


def test_a_block_of_one_kv_group_is_never_registered_for_another() -> None:
    pool = BlockPool(1, 16, (None, 6))
    (block,) = held(pool, 1)
    pool.register(block, name(1), 1)
    with pytest.raises(AssertionError, match="another hash or KV group"):
        pool.register(block, name(1), 0)


def test_what_is_retained_is_evicted_last_and_from_its_tail() -> None:
    pool = BlockPool(4, 16)
    cached(pool, 1, 2, 3, 4)
    pool.retain([name(1), name(2)])
    taken = [*held(pool, 2)]
    assert [pool.count_prefix([name(number)]) for number in (1, 2, 3, 4)] == [1, 1, 0, 0]
    taken += held(pool, 1)
    assert [pool.count_prefix([name(number)]) for number in (1, 2)] == [1, 0]
    pool.release(taken)
    pool.check_integrity()


def test_blocks_that_are_released_while_their_hash_is_retained_are_evicted_last() -> None:
    pool = BlockPool(2, 16)
    pool.retain([name(1)])
    (block,) = held(pool, 1)
    pool.register(block, name(1))
    pool.release([block])
    cached(pool, 2)
    held(pool, 1)
    assert pool.count_prefix([name(1)]) == 1
    assert pool.count_prefix([name(2)]) == 0


def test_a_hash_is_retained_until_each_retention_has_ended() -> None:
    pool = BlockPool(2, 16)
    cached(pool, 1, 2)
    pool.retain([name(1)])
    pool.retain([name(1)])
    pool.end_retention([name(1)])
    assert pool.num_retained == 1
    held(pool, 1)
    assert pool.count_prefix([name(1)]) == 1
    pool.end_retention([name(1)])
    assert pool.num_retained == 0
    held(pool, 1)
    assert pool.count_prefix([name(1)]) == 0


def test_blocks_count_as_just_used_when_their_retention_ends() -> None:
    pool = BlockPool(3, 16)
    cached(pool, 1, 2, 3)
    pool.retain([name(1)])
    pool.end_retention([name(1)])
    held(pool, 2)
    assert [pool.count_prefix([name(number)]) for number in (1, 2, 3)] == [1, 0, 0]
