"""Block tables of sequences: allocates slots from the pool, registers computed blocks, forks and frees sequences."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

from pdserve.base.ids import BlockHash, BlockId, BlockTables
from pdserve.base.layout import first_block_read
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence


class BlockManager:
    """Makes every change of a block table. Failure to allocate is `False` and changes nothing.

    Blocks are appended to a table in place; any other change makes a new array. In vLLM, `admit` and `extend` are
    `allocate_slots` (formerly `append_slots` for running sequences), and `advance` is `cache_full_blocks`.

    The tables of all KV groups have the same length. Blocks behind a window are released when the tokens in front of
    them are computed, not before: until then the sequence could have to compute them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._num_groups = pool.num_groups
        self._has_windows = any(window is not None for window in pool.windows)
        #: Tokens looked up in the prefix cache, and found there, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        #: Blocks of output that continued requests have found since the start.
        self.num_reused_blocks = 0

    def admit(self, sequence: Sequence, num_slots: int, *, headroom: int = 0, recompute_last: bool = True) -> bool:
        """Give a sequence without blocks slots for `num_slots` tokens, reusing blocks of the prefix cache.

        In each KV group, `headroom` blocks must stay free. With `recompute_last` at least the last token is left to
        compute, because its logits are needed. Afterwards `sequence.num_computed` is the number of reused tokens.
        """
        assert not sequence.block_table, f"{sequence.id} already holds blocks"
        pool = self.pool
        hashes = self._reusable(sequence, recompute_last)
        num_matched = self._count_matched(sequence, hashes)
        heads = self._heads(sequence, num_matched)
        matched = [pool.match_prefix(hashes[head:num_matched], group) for group, head in enumerate(heads)]
        num_fresh = pool.blocks_for(num_slots) - num_matched
        fresh = None
        if (num_fresh + headroom) * pool.num_groups <= pool.num_free:
            fresh = pool.allocate(num_fresh * pool.num_groups)
        if fresh is None:
            for blocks in matched:
                pool.release(reversed(blocks))
            return False
        tables = [
            array("q", (*[0] * head, *blocks, *fresh[group :: pool.num_groups]))
            for group, (head, blocks) in enumerate(zip(heads, matched, strict=True))
        ]
        _set_tables(sequence, tables)
        sequence.num_dropped = tuple(heads) if self._has_windows else ()
        sequence.num_registered = num_matched
        sequence.num_computed = num_matched * pool.block_size
        sequence.num_slots = len(sequence.block_table) * pool.block_size
        # Else it was preempted and finds its own blocks, or looks for none.
        if not (sequence.num_output or sequence.is_scored):
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed
        return True

    def count_cached(self, sequence: Sequence, *, recompute_last: bool = True) -> int:
        """Tokens of a sequence without blocks that `admit` would find in the prefix cache; takes no references."""
        return self._count_matched(sequence, self._reusable(sequence, recompute_last)) * self.pool.block_size

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make slots `[num_computed, num_tokens)` exist, in blocks that only this sequence writes to."""
        if num_tokens <= sequence.num_slots:
            return True
        pool, length = self.pool, len(sequence.block_table)
        # Only the first block to be written can be shared: forks share a prompt, and all later blocks are their own.
        first = sequence.num_computed // pool.block_size
        shared = self._shared(sequence, first) if first < length else ()
        num_fresh = max(0, pool.blocks_for(num_tokens) - length)
        if num_fresh * self._num_groups + len(shared) > pool.num_free:
            return False
        if shared:
            _set_tables(sequence, [self._own(t, first) if g in shared else t for g, t in enumerate(sequence.tables)])
        sequence.block_table.extend(pool.allocate(num_fresh) or ())
        for table in sequence.other_tables:
            table.extend(pool.allocate(num_fresh) or ())
        sequence.num_slots = len(sequence.block_table) * pool.block_size
        return True

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Record that KV up to `num_computed` is stored, and register the blocks that are full now."""
        sequence.num_computed = num_computed
        num_full = num_computed // self.pool.block_size
        if num_full <= sequence.num_registered:
            return
        hashes, first = sequence.hash_full_blocks(self.pool.block_size), sequence.num_registered
        for index in range(max(first, sequence.dropped(0)) if self._has_windows else first, num_full):
            self.pool.register(BlockId(sequence.block_table[index]), hashes[index])
        for group, table in enumerate(sequence.other_tables, 1):
            for index in range(max(first, sequence.dropped(group)), num_full):
                self.pool.register(BlockId(table[index]), hashes[index], group)
        sequence.num_registered = num_full
        if self._has_windows:
            self._drop_unread(sequence)

    def receive_prompt(self, sequence: Sequence) -> None:
        """Record that another worker has computed the prompt. Blocks that no later token reads were not sent."""
        sequence.num_computed = sequence.num_prompt
        if self._has_windows:
            self._drop_unread(sequence)
        self.advance(sequence, sequence.num_prompt)

    def first_missing(self, num_prompt: int, num_cached: int) -> tuple[int, ...]:
        """Index of the first block of each KV group that `receive_prompt` needs to have been received.

        Of `num_prompt` tokens, `num_cached` were found in the prefix cache.
        """
        size = self.pool.block_size
        read = (first_block_read(window, num_prompt, size) for window in self.pool.windows)
        return tuple(max(num_cached // size, first) for first in read)

    def fork(self, prompt_sequence: Sequence, choice_index: int) -> Sequence:
        """Another choice that shares the prompt's blocks; a partial last block is copied when either writes to it."""
        num_blocks = self.pool.blocks_for(prompt_sequence.num_prompt)
        prompt_sequence.num_slots = prompt_sequence.num_computed
        choice = Sequence(
            request_id=prompt_sequence.request_id,
            choice_index=choice_index,
            params=prompt_sequence.params,
            hash_key=prompt_sequence.hash_key,
            tokens=array("q", prompt_sequence.tokens[: prompt_sequence.num_prompt]),
            num_prompt=prompt_sequence.num_prompt,
            hashes=prompt_sequence.hashes[: prompt_sequence.num_prompt // self.pool.block_size],
            block_table=prompt_sequence.block_table[:num_blocks],
            other_tables=tuple(table[:num_blocks] for table in prompt_sequence.other_tables),
            num_dropped=prompt_sequence.num_dropped,
            num_computed=prompt_sequence.num_prompt,
            num_slots=prompt_sequence.num_prompt,
            num_registered=prompt_sequence.num_prompt // self.pool.block_size,
            admission_order=prompt_sequence.admission_order,
            is_alone=prompt_sequence.is_alone,
            is_best_effort=prompt_sequence.is_best_effort,
            grammar=prompt_sequence.grammar,
            rules=prompt_sequence.rules,
        )
        self.pool.share(choice.held_blocks())
        return choice

    def reuse_behind(self, sequence: Sequence) -> None:
        """Replace blocks that are to be computed by cached ones, behind the computed tokens.

        At least the last token is left to compute. A KV cache of several groups, or of a window, is left as it is.
        """
        pool, first = self.pool, sequence.num_computed // self.pool.block_size
        hashes = self._reusable(sequence, recompute_last=True)[first:]
        matched = pool.match_prefix(hashes) if pool.windows == (None,) else []
        if not matched:
            return
        pool.release(BlockId(block) for block in reversed(sequence.block_table[first:]))
        _set_tables(sequence, [array("q", (*sequence.block_table[:first], *matched))])
        sequence.num_registered = len(sequence.block_table)
        sequence.num_slots = sequence.num_computed = sequence.num_registered * pool.block_size
        self.num_reused_blocks += len(matched)

    def recompute_last_token(self, sequence: Sequence) -> None:
        """Prepare a sequence whose whole prompt was found in the cache to compute its last token after all.

        The last matched block is released and replaced by the spare one behind it, so nothing is allocated.
        """
        last = sequence.num_computed // self.pool.block_size - 1
        assert sequence.num_pending == 0, f"{sequence.id} has tokens to compute"
        assert len(sequence.block_table) == last + 2, f"{sequence.id} holds no spare block"
        has_window = all(sequence.dropped(group) <= head for group, head in enumerate(self._heads(sequence, last)))
        assert has_window, f"{sequence.id} lacks blocks that its last token reads"
        self.pool.release(BlockId(table[last]) for table in sequence.tables)
        _set_tables(sequence, [array("q", (*table[:last], *table[last + 1 :])) for table in sequence.tables])
        sequence.num_slots = len(sequence.block_table) * self.pool.block_size
        sequence.num_computed = last * self.pool.block_size
        sequence.num_registered = last

    def prompt_blocks(self, sequence: Sequence) -> BlockTables:
        """The blocks of the prompt, in order, of each KV group."""
        num_blocks = self.pool.blocks_for(sequence.num_prompt)
        return tuple(tuple(BlockId(block) for block in table[:num_blocks]) for table in sequence.tables)

    def free(self, sequence: Sequence) -> None:
        """Release all blocks. The tokens stay, so the sequence can be admitted again and recompute them."""
        self.pool.release(sequence.held_blocks())
        sequence.block_table = array("q")
        sequence.other_tables = ()
        sequence.num_dropped = ()
        sequence.num_slots = 0
        sequence.num_computed = 0
        sequence.num_registered = 0

    def _reusable(self, sequence: Sequence, recompute_last: bool) -> Items[BlockHash]:
        """Hashes of the full blocks that need not be computed again."""
        if sequence.is_scored:
            return ()
        num_tokens = sequence.num_tokens - 1 if recompute_last else sequence.num_tokens
        return sequence.hash_full_blocks(self.pool.block_size)[: num_tokens // self.pool.block_size]

    def _count_matched(self, sequence: Sequence, hashes: Items[BlockHash]) -> int:
        """Length of the longest prefix of `hashes` whose blocks are cached, apart from those behind the windows."""
        pool, num_matched = self.pool, len(hashes)
        for group, window in enumerate(pool.windows):
            if window is None:
                num_matched = pool.count_prefix(hashes[:num_matched], group)
        while self._has_windows and (missing := self._last_missing(sequence, hashes[:num_matched])) is not None:
            num_matched = missing
        return num_matched

    def _last_missing(self, sequence: Sequence, hashes: Items[BlockHash]) -> int | None:
        """Index of a block within a window that is not cached, the last one of its KV group; None: all are cached."""
        for group, head in enumerate(self._heads(sequence, len(hashes))):
            if self.pool.windows[group] is None:
                continue
            for index in reversed(range(head, len(hashes))):
                if not self.pool.count_prefix(hashes[index : index + 1], group):
                    return index
        return None

    def _heads(self, sequence: Sequence, num_matched: int) -> list[int]:
        """Index of the first block of each KV group that is read when `num_matched` blocks are reused.

        The last token may still be computed again, although its block is reused (`recompute_last_token`).
        """
        size = self.pool.block_size
        start = min(num_matched, (sequence.num_tokens - 1) // size) * size
        return [first_block_read(window, start, size) for window in self.pool.windows]

    def _shared(self, sequence: Sequence, index: int) -> list[int]:
        """The KV groups whose block at this index other sequences hold, too."""
        return [g for g, table in enumerate(sequence.tables) if self.pool.ref_count(BlockId(table[index])) > 1]

    def _own(self, table: array[int], index: int) -> array[int]:
        """The table with a block that only its sequence writes to. There must be a free block."""
        own = self.pool.copy_on_write(BlockId(table[index]))
        assert own is not None, "a free block was counted"
        return array("q", (*table[:index], own, *table[index + 1 :]))

    def _drop_unread(self, sequence: Sequence) -> None:
        """Release the blocks that no token behind the computed ones reads."""
        dropped = []
        for group, (window, table) in enumerate(zip(self.pool.windows, sequence.tables, strict=True)):
            head = sequence.dropped(group)
            stop = max(head, first_block_read(window, sequence.num_computed, self.pool.block_size))
            self.pool.release(BlockId(block) for block in reversed(table[head:stop]))
            dropped.append(stop)
        sequence.num_dropped = tuple(dropped)


def _set_tables(sequence: Sequence, tables: Items[array[int]]) -> None:
    sequence.block_table, *others = tables
    sequence.other_tables = tuple(others)
