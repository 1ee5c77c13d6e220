"""Drives a decoder as an engine does: several sequences, prompts in chunks, then a row a step, in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder


class PagedRunner:
    """Sequences with block tables in a random order, in a cache that starts full of NaN, or of what `fill` says."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int = 16,
        seed: int = 0,
        fill: float = torch.nan,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype`: of the cache; None: the decoder's."""
        config = decoder.config
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        self.kv_cache = torch.full(shape, fill, dtype=kv_dtype or decoder.dtype, device=decoder.device)
        self._decoder = decoder
        self._block_size = block_size
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []

    def add_sequence(self) -> int:
        """The index of a new, empty sequence."""
        self._tables.append([])
        self._lengths.append(0)
        return len(self._tables) - 1

    def kv(self, sequence: int) -> Tensor:
        """A copy of what is stored of a sequence: [num_layers, 2, num_kv_heads, length, head_dim]."""
        blocks = self.kv_cache[self._tables[sequence]].permute(1, 2, 3, 0, 4, 5)
        return blocks.flatten(3, 4)[..., : self._lengths[sequence], :]

    def refill(self, value: float) -> None:
        """Overwrites whatever no sequence has written."""
        unused = torch.ones(self.kv_cache.shape[0], self._block_size, dtype=torch.bool, device=self.kv_cache.device)
        for table, length in zip(self._tables, self._lengths, strict=True):
            for index, block in enumerate(table):
                unused[block, : length - index * self._block_size] = False
        self.kv_cache.movedim(4, 1)[unused] = value

    def step(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        *,
        last_only: bool = True,
        asks: Sequence[bool] | None = None,
    ) -> Tensor:
        """Appends tokens to sequences in one batch; logits of each one's last row, or of all rows.

        `asks`: which sequences' logits are wanted; None: all of them.
        """
        batch = self.make_batch(rows, last_only=last_only, asks=asks)
        # A copy: the next step may use the same memory.
        return self._decoder.forward(batch, self.kv_cache).clone()

    def make_batch(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        *,
        last_only: bool = True,
        asks: Sequence[bool] | None = None,
    ) -> Batch:
        """The batch of such a step; the sequences grow."""
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, new in rows:
            table = self._tables[sequence]
            for token in new:
                position = self._lengths[sequence]
                if position == len(table) * size:
                    table.append(self._free.pop())
                tokens.append(token)
                positions.append(position)
                slots.append(table[position // size] * size + position % size)
                self._lengths[sequence] += 1
            starts.append(len(tokens))
        tables = [self._tables[sequence] for sequence, _ in rows]
        width = max(map(len, tables))
        wanted = [
            row
            for start, stop, asked in zip(starts, starts[1:], asks or [True] * len(rows), strict=False)
            for row in range(stop - 1 if last_only else start, stop)
            if asked
        ]
        as_index = partial(torch.tensor, dtype=torch.int64, device=self.kv_cache.device)
        return Batch(
            token_ids=as_index(tokens),
            positions=as_index(positions),
            slot_mapping=as_index(slots),
            query_starts=as_index(starts),
            context_lens=as_index([self._lengths[sequence] for sequence, _ in rows]),
            block_tables=as_index([table + [0] * (width - len(table)) for table in tables]),
            logits_rows=as_index(wanted),
        )


def generate_greedily(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 100, block_size: int = 16
) -> tuple[list[list[int]], list[Tensor]]:
    """For each prompt, `num_tokens` tokens and the logits [num_tokens, vocab] they were chosen from.

    Prompts are computed in chunks one after the other, then all sequences decode together.
    """
    longest = max(map(len, prompts)) + num_tokens
    runner = PagedRunner(decoder, num_blocks=len(prompts) * (longest // block_size + 1), block_size=block_size)
    last: list[Tensor] = []
    for prompt in prompts:
        sequence = runner.add_sequence()
        pieces = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)]
        last.append([runner.step([(sequence, piece)])[0] for piece in pieces][-1])
    outputs: list[list[int]] = [[] for _ in prompts]
    chosen: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(num_tokens):
        for sequence, logits in enumerate(last):
            chosen[sequence].append(logits)
            outputs[sequence].append(int(logits.argmax()))
        if step + 1 < num_tokens:
            last = list(runner.step([(sequence, output[-1:]) for sequence, output in enumerate(outputs)]))
    return outputs, [torch.stack(rows) for rows in chosen]
