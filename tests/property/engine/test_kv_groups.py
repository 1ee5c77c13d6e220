"""Prefixes of several KV groups: what `BlockManager` reuses is the longest prefix whose tokens can go on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.ids import RequestId
from pdserve.base.layout import first_block_read
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence
from tests.support.depth import IS_FULL

BLOCK_SIZE, NUM_BLOCKS, KEY = 2, 5, bytes(32)
windows = st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3)


@settings(max_examples=2000 if IS_FULL else 150)
@given(
    windows=windows,
    num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_SIZE),
    cached=st.lists(st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=NUM_BLOCKS - 2), min_size=3, max_size=3),
    recompute_last=st.booleans(),
)
def test_the_longest_prefix_is_reused_whose_next_token_finds_all_that_it_reads(
    windows: list[int | None], num_tokens: int, cached: list[set[int]], recompute_last: bool
) -> None:
    pool = BlockPool(3 * NUM_BLOCKS * len(windows), BLOCK_SIZE, windows)
    blocks = BlockManager(pool)
    sequence = Sequence.from_prompt(RequestId("r"), range(num_tokens), SamplingParams(), hash_key=KEY)
    hashes = sequence.hash_full_blocks(BLOCK_SIZE)
    for group in range(len(windows)):
        for index in cached[group] & set(range(len(hashes))):
            (block,) = pool.allocate(1) or ()
            pool.register(block, hashes[index], group)
            pool.release([block])

    def can_go_on(num_reused: int) -> bool:
        # When all is reused and the transfer does not come, the last token is computed again, and with it its block.
        start = min(num_reused, (num_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE
        read = (range(first_block_read(window, start, BLOCK_SIZE), num_reused) for window in windows)
        return all(cached[group].issuperset(needed) for group, needed in enumerate(read))

    limit = (num_tokens - recompute_last) // BLOCK_SIZE
    longest = max(count for count in range(limit + 1) if can_go_on(count))
    assert blocks.count_cached(sequence, recompute_last=recompute_last) == longest * BLOCK_SIZE
    assert blocks.admit(sequence, num_tokens + 1, recompute_last=recompute_last)
    assert sequence.num_computed == longest * BLOCK_SIZE
    assert {len(table) for table in sequence.tables} == {pool.blocks_for(num_tokens + 1)}
    pool.check_integrity([sequence.held_blocks()])
    if not sequence.num_pending:
        blocks.recompute_last_token(sequence)
        pool.check_integrity([sequence.held_blocks()])
    blocks.free(sequence)
    assert pool.num_free == pool.num_blocks
    pool.check_integrity([])
