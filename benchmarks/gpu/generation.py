"""Answers requests with a bare loop around the forward pass: prompts in chunks, then decode steps for all at once.

Greedy, without scheduler, sampler and server: the throughput that the kernels allow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.measure import captured
from benchmarks.gpu.setting import DTYPE, Setting
from kernels.bench.inputs import BLOCK_SIZE, blocks_of, kv_rows
from kernels.bench.work import Work, decoder_work
from kernels.ops import KvRows


class Generation:
    """Memory and graphs for requests of one size; `run` answers them and may be repeated."""

    def __init__(self, setting: Setting, num_requests: int, prompt_tokens: int, output_tokens: int) -> None:
        length = prompt_tokens + output_tokens
        spans = [(1, length)] * num_requests
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._kernel = setting.decoder(deterministic=False)
        self._cache = setting.kv_cache(blocks_of(spans), len(setting.shape.windows))
        #: Rows of a step; positions and values derived from them are updated in place.
        self._rows = kv_rows(spans, setting.device, is_scattered=True)
        self._every_row = torch.arange(num_requests, device=setting.device)
        self._tokens = torch.zeros(num_requests, dtype=torch.int64, device=setting.device)
        self._output = torch.zeros(num_requests, output_tokens, dtype=torch.int64, device=setting.device)
        self._column = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self._prompts_per_chunk = max(1, setting.sizes.prefill_tokens // prompt_tokens)
        self._restart()
        self._step = captured(self._advance) if setting.has_graphs else self._advance

    def run(self, prompts: Tensor) -> Tensor:
        """int64 [num_requests, prompt_tokens] -> [num_requests, output_tokens]. Does not wait for the device."""
        self._restart()
        chunks = [slice(at, at + self._prompts_per_chunk) for at in range(0, len(prompts), self._prompts_per_chunk)]
        firsts = [self._prefill(prompts[chunk], self._rows.block_tables[chunk]) for chunk in chunks]
        self._tokens.copy_(torch.cat(firsts))
        self._output[:, 0] = self._tokens
        for _ in range(self._output_tokens - 1):
            self._step()
        return self._output

    def _restart(self) -> None:
        """Resets the state to the first decode step: the prompt is in the cache, and its first token is known."""
        self._rows.positions.fill_(self._prompt_tokens)
        self._rows.context_lens.fill_(self._prompt_tokens + 1)
        self._column.fill_(1)
        self._tokens.zero_()

    def _prefill(self, token_ids: Tensor, block_tables: Tensor) -> Tensor:
        """Computes whole prompts; returns their first tokens."""
        count, length = token_ids.shape
        device = token_ids.device
        positions = torch.arange(length, device=device)
        slots = block_tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        rows = KvRows(
            positions=positions.repeat(count),
            slot_mapping=slots.flatten(),
            query_starts=torch.arange(count + 1, device=device) * length,
            context_lens=torch.full((count,), length, device=device),
            block_tables=block_tables,
        )
        logits = self._kernel.forward(token_ids.flatten(), rows, rows.query_starts[1:] - 1, self._cache)
        return logits.argmax(1)

    def _advance(self) -> None:
        """Computes one token per request, with all state on the device."""
        rows = self._rows
        blocks = rows.block_tables.gather(1, (rows.positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        rows.slot_mapping.copy_(blocks * BLOCK_SIZE + rows.positions % BLOCK_SIZE)
        logits = self._kernel.forward(self._tokens, rows, self._every_row, self._cache)
        self._tokens.copy_(logits.argmax(1))
        # Warm-up steps may pass the last column.
        self._output.index_copy_(1, self._column.remainder(self._output_tokens), self._tokens.unsqueeze(1))
        rows.positions.add_(1)
        rows.context_lens.add_(1)
        self._column.add_(1)

    def work(self, setting: Setting) -> Work:
        """Work of a whole run."""
        shape, weight_bytes, length = setting.shape, self._kernel.weight_bytes, self._prompt_tokens
        total, left = Work(num_bytes=0.0, flops=0.0), len(self._tokens)
        while left > 0:
            spans = [(length, length)] * min(left, self._prompts_per_chunk)
            total += decoder_work(shape, spans, DTYPE.itemsize, weight_bytes)
            left -= len(spans)
        for step in range(1, self._output_tokens):
            spans = [(1, length + step)] * len(self._tokens)
            total += decoder_work(shape, spans, DTYPE.itemsize, weight_bytes)
        return total
