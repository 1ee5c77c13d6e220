"""Block tables of sequences: allocates slots from the pool, registers computed blocks, forks and frees sequences."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from pdserve.base.ids import BlockId
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence


class BlockManager:
    """Makes every change of a block table. Failure to allocate is `False` and changes nothing.

    Blocks are appended to a table in place; any other change makes a new array. In vLLM, `admit` and `extend` are
    `allocate_slots` (formerly `append_slots` for running sequences), and `advance` is `cache_full_blocks`.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        #: Tokens looked up in the prefix cache, and found there, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def admit(self, sequence: Sequence, num_slots: int, *, headroom: int = 0, recompute_last: bool = True) -> bool:
        """Give a sequence without blocks slots for `num_slots` tokens, reusing blocks of the prefix cache.

        `headroom` blocks must stay free. With `recompute_last` at least the last token is left to compute, because
        its logits are needed. Afterwards `sequence.num_computed` is the number of reused tokens.
        """
        assert not sequence.block_table, f"{sequence.id} already holds blocks"
        pool = self.pool
        hashes = sequence.hash_full_blocks(pool.block_size)
        num_reusable = sequence.num_tokens - 1 if recompute_last else sequence.num_tokens
        matched = pool.match_prefix(hashes[: num_reusable // pool.block_size])
        num_fresh = pool.blocks_for(num_slots) - len(matched)
        fresh = pool.allocate(num_fresh) if num_fresh + headroom <= pool.num_free else None
        if fresh is None:
            pool.release(reversed(matched))
            return False
        sequence.block_table.extend(matched)
        sequence.block_table.extend(fresh)
        sequence.num_registered = len(matched)
        sequence.num_computed = len(matched) * pool.block_size
        sequence.num_slots = len(sequence.block_table) * pool.block_size
        if not sequence.num_output:  # Else it was preempted, and finds its own blocks.
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed
        return True

    def count_cached(self, sequence: Sequence) -> int:
        """Tokens of a sequence without blocks that `admit` would find in the prefix cache; takes no references."""
        block_size = self.pool.block_size
        hashes = sequence.hash_full_blocks(block_size)
        return self.pool.count_prefix(hashes[: (sequence.num_tokens - 1) // block_size]) * block_size

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make slots `[num_computed, num_tokens)` exist, in blocks that only this sequence writes to."""
        if num_tokens <= sequence.num_slots:
            return True
        pool, table = self.pool, sequence.block_table
        # Only the first block to be written can be shared: forks share a prompt, and all later blocks are their own.
        first = sequence.num_computed // pool.block_size
        needs_copy = first < len(table) and pool.ref_count(BlockId(table[first])) > 1
        num_fresh = max(0, pool.blocks_for(num_tokens) - len(table))
        num_needed = num_fresh + 1 if needs_copy else num_fresh
        if num_needed > pool.num_free:
            return False
        if needs_copy:
            own = pool.copy_on_write(BlockId(table[first]))
            assert own is not None, "a free block was counted above"
            table = sequence.block_table = array("q", (*table[:first], own, *table[first + 1 :]))
        table.extend(pool.allocate(num_fresh) or ())
        sequence.num_slots = len(table) * pool.block_size
        return True

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Record that KV up to `num_computed` is stored, and register the blocks that are full now."""
        sequence.num_computed = num_computed
        num_full = num_computed // self.pool.block_size
        if num_full <= sequence.num_registered:
            return
        hashes = sequence.hash_full_blocks(self.pool.block_size)
        for index in range(sequence.num_registered, num_full):
            self.pool.register(BlockId(sequence.block_table[index]), hashes[index])
        sequence.num_registered = num_full

    def fork(self, prompt_sequence: Sequence, choice_index: int) -> Sequence:
        """Another choice that shares the prompt's blocks; a partial last block is copied when either writes to it."""
        num_blocks = self.pool.blocks_for(prompt_sequence.num_prompt)
        self.pool.share(BlockId(block) for block in prompt_sequence.block_table[:num_blocks])
        prompt_sequence.num_slots = prompt_sequence.num_computed
        return Sequence(
            request_id=prompt_sequence.request_id,
            choice_index=choice_index,
            params=prompt_sequence.params,
            hash_key=prompt_sequence.hash_key,
            tokens=array("q", prompt_sequence.tokens[: prompt_sequence.num_prompt]),
            num_prompt=prompt_sequence.num_prompt,
            hashes=prompt_sequence.hashes[: prompt_sequence.num_prompt // self.pool.block_size],
            block_table=prompt_sequence.block_table[:num_blocks],
            num_computed=prompt_sequence.num_prompt,
            num_slots=prompt_sequence.num_prompt,
            num_registered=prompt_sequence.num_prompt // self.pool.block_size,
            admission_order=prompt_sequence.admission_order,
            is_alone=prompt_sequence.is_alone,
        )

    def recompute_last_token(self, sequence: Sequence) -> None:
        """Prepare a sequence whose whole prompt was found in the cache to compute its last token after all.

        The last matched block is released and replaced by the spare one behind it, so nothing is allocated.
        """
        last = sequence.num_computed // self.pool.block_size - 1
        assert sequence.num_pending == 0, f"{sequence.id} has tokens to compute"
        assert len(sequence.block_table) == last + 2, f"{sequence.id} holds no spare block"
        table = sequence.block_table
        self.pool.release((BlockId(table[last]),))
        sequence.block_table = array("q", (*table[:last], *table[last + 1 :]))
        sequence.num_slots = len(sequence.block_table) * self.pool.block_size
        sequence.num_computed = last * self.pool.block_size
        sequence.num_registered = last

    def prompt_blocks(self, sequence: Sequence) -> tuple[BlockId, ...]:
        """The blocks of the prompt, in order."""
        num_blocks = self.pool.blocks_for(sequence.num_prompt)
        return tuple(BlockId(block) for block in sequence.block_table[:num_blocks])

    def free(self, sequence: Sequence) -> None:
        """Release all blocks. The tokens stay, so the sequence can be admitted again and recompute them."""
        self.pool.release(_back_to_front(sequence.block_table))
        sequence.block_table = array("q")
        sequence.num_slots = 0
        sequence.num_computed = 0
        sequence.num_registered = 0


def _back_to_front(table: array[int]) -> Iterator[BlockId]:
    return (BlockId(block) for block in reversed(table))
