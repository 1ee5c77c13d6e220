"""Drives a decoder as the engine does: several sequences in a paged cache, prompts in chunks, then one row per step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder


class PagedRunner:
    """Sequences with randomly ordered block tables, in a cache whose initial content is NaN, or `fill`."""

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
        """`kv_dtype`: dtype of the cache; None: the decoder's."""
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
        """A copy of the stored KV of a sequence: [num_layers, 2, num_kv_heads, length, head_dim]."""
        blocks = self.kv_cache[self._tables[sequence]].permute(1, 2, 3, 0, 4, 5)
        return blocks.flatten(3, 4)[..., : self._lengths[sequence], :]

    def refill(self, value: float) -> None:
        """Overwrites all slots that no sequence has written."""
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
        requested: Sequence[bool] | None = None,
    ) -> Tensor:
        """Appends tokens to sequences in one batch; returns the logits of each one's last row, or of all rows.

        `requested`: for each sequence whether it needs logits; None: all do.
        """
        batch = self.make_batch(rows, last_only=last_only, requested=requested)
        # A copy, because the next step may use the same memory.
        return self._decoder.forward(batch, self.kv_cache).clone()

    def make_batch(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        *,
        last_only: bool = True,
        requested: Sequence[bool] | None = None,
    ) -> Batch:
        """The batch of such a step; appends its tokens to the sequences."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, new in rows:
            tokens += new
            positions += range(self._lengths[sequence], self._lengths[sequence] + len(new))
            slots += [self._append(sequence) for _ in new]
            starts.append(len(tokens))
        tables = [self._tables[sequence] for sequence, _ in rows]
        width = max(map(len, tables))
        logits_rows = [
            row
            for start, stop, has_logits in zip(starts, starts[1:], requested or [True] * len(rows), strict=False)
            for row in range(stop - 1 if last_only else start, stop)
            if has_logits
        ]
        as_index = partial(torch.tensor, dtype=torch.int64, device=self.kv_cache.device)
        return Batch(
            token_ids=as_index(tokens),
            positions=as_index(positions),
            slot_mapping=as_index(slots),
            query_starts=as_index(starts),
            context_lens=as_index([self._lengths[sequence] for sequence, _ in rows]),
            block_tables=as_index([table + [0] * (width - len(table)) for table in tables]),
            logits_rows=as_index(logits_rows),
        )

    def _append(self, sequence: int) -> int:
        """Adds a token to a sequence, with a new block if necessary; returns its slot."""
        table, position = self._tables[sequence], self._lengths[sequence]
        if position == len(table) * self._block_size:
            table.append(self._free.pop())
        self._lengths[sequence] += 1
        return table[position // self._block_size] * self._block_size + position % self._block_size


def generate_greedily(
    decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 100, block_size: int = 16
) -> tuple[list[list[int]], list[Tensor]]:
    """For each prompt, `num_tokens` tokens and the logits [num_tokens, vocab] from which they were chosen.

    Prompts are computed in chunks, one prompt after the other; then all sequences decode together.
    """
    longest = max(map(len, prompts)) + num_tokens
    runner = PagedRunner(decoder, num_blocks=len(prompts) * (longest // block_size + 1), block_size=block_size)
    last: list[Tensor] = []
    for prompt in prompts:
        sequence = runner.add_sequence()
        chunks = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)]
        last.append([runner.step([(sequence, tokens)])[0] for tokens in chunks][-1])
    outputs: list[list[int]] = [[] for _ in prompts]
    chosen: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(num_tokens):
        for sequence, logits in enumerate(last):
            chosen[sequence].append(logits)
            outputs[sequence].append(int(logits.argmax()))
        if step + 1 < num_tokens:
            last = list(runner.step([(sequence, output[-1:]) for sequence, output in enumerate(outputs)]))
    return outputs, [torch.stack(rows) for rows in chosen]
