"""Joins sequences and the pool: gives sequences room, registers what they computed, forks and frees them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from pdserve.base.ids import BlockId
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence


class BlockManager:
    """Every change of a block table goes through here. Failure to allocate is `False` and changes nothing.

    A table is appended to in place; any other change makes a new array.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        #: Tokens looked up in, and found in, the prefix cache since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def admit(self, sequence: Sequence, num_slots: int, *, headroom: int = 0, recompute_last: bool = True) -> bool:
        """Give a sequence without blocks room for `num_slots` tokens, starting with what the prefix cache has.

        `headroom` blocks must stay free. With `recompute_last` at least the last token is left to compute, because
        its logits are wanted. Afterwards `sequence.num_computed` is the number of reused tokens.
        """
        assert not sequence.block_table, f"{sequence.id} already holds blocks"
        pool = self.pool
        hashes = sequence.hash_full_blocks(pool.block_size)
        usable = (sequence.num_tokens - recompute_last) // pool.block_size
        matched = pool.match_prefix(hashes[:usable])
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
        if not sequence.num_output:  # else it was preempted, and finds what it left behind
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed
        return True

    def count_cached(self, sequence: Sequence) -> int:
        """Tokens of a sequence without blocks that `admit` would find in the prefix cache now; takes no references."""
        usable = (sequence.num_tokens - 1) // self.pool.block_size
        return self.pool.count_prefix(sequence.hash_full_blocks(self.pool.block_size)[:usable]) * self.pool.block_size

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make slots `[num_computed, num_tokens)` exist and be the sequence's own to write."""
        if num_tokens <= sequence.num_slots:
            return True
        pool, table = self.pool, sequence.block_table
        # Only the first block to be written can be shared: forks share a prompt, and all later blocks are their own.
        first = sequence.num_computed // pool.block_size
        shared = first < len(table) and pool.ref_count(BlockId(table[first])) > 1
        num_fresh = max(0, pool.blocks_for(num_tokens) - len(table))
        if shared + num_fresh > pool.num_free:
            return False
        if shared:
            own = pool.copy_on_write(BlockId(table[first]))
            assert own is not None, "a free block was counted above"
            table = sequence.block_table = array("q", (*table[:first], own, *table[first + 1 :]))
        table.extend(pool.allocate(num_fresh) or ())
        sequence.num_slots = len(table) * pool.block_size
        return True

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Note that KV up to `num_computed` is stored, and make the blocks that this filled reusable."""
        sequence.num_computed = num_computed
        num_full = num_computed // self.pool.block_size
        if num_full <= sequence.num_registered:
            return
        hashes = sequence.hash_full_blocks(self.pool.block_size)
        for index in range(sequence.num_registered, num_full):
            self.pool.register(BlockId(sequence.block_table[index]), hashes[index])
        sequence.num_registered = num_full

    def fork(self, prompt_sequence: Sequence, choice_index: int) -> Sequence:
        """Another choice that shares the prompt blocks; the partial last one is copied when either writes."""
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
        )

    def recompute_last_token(self, sequence: Sequence) -> None:
        """Prepare a sequence whose whole prompt was found in the cache for computing its last token after all.

        The last matched block is given back and the spare one behind it takes its place, so nothing is allocated.
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
        """Those of the prompt, in order."""
        num_blocks = self.pool.blocks_for(sequence.num_prompt)
        return tuple(BlockId(block) for block in sequence.block_table[:num_blocks])

    def free(self, sequence: Sequence) -> None:
        """Give all blocks back; the tokens stay, so the sequence can be admitted again and recompute."""
        self.pool.release(_back_to_front(sequence.block_table))
        sequence.block_table = array("q")
        sequence.num_slots = 0
        sequence.num_computed = 0
        sequence.num_registered = 0


def _back_to_front(table: array[int]) -> Iterator[BlockId]:
    return (BlockId(block) for block in reversed(table))
