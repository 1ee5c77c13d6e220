"""A model's memory needs are measured by running its largest steps."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path

import pytest
import torch

from kernels.triton.sample_rows import MAX_ROWS
from pdserve.base.layout import KvLayout
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.model.batch import Batch
from pdserve.model.loader import load_decoder
from pdserve.worker.load.memory_profile import Activations, LargestSteps, await_free_memory, measure_activations
from tests.unit.model.tiny import save_model


class CountedMemory:
    """A device on which the weights take 700 bytes, and each row of a step 10."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.watched = 0

    def total(self) -> int:
        return 100_000

    def free(self) -> int:
        return 80_000

    def allocated(self) -> int:
        return 700

    def peak(self) -> int:
        return 700 + 10 * max(self.rows[self.watched :])

    def reset_peak(self) -> None:
        self.watched = len(self.rows)


class CountingSampler(Sampler):
    """Remembers the number of rows of each call."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def sample(self, logits: torch.Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        self.num_rows.append(len(rows))
        return super().sample(logits, rows, logits_rows)


@pytest.mark.parametrize("replayed", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_prompts", "num_blocks"), [(40, 1, 3), (150, 3, 4)])
def test_the_largest_steps_are_run_and_their_peak_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_prompts: int,
    num_blocks: int,
    replayed: bool,
) -> None:
    decoder = load_decoder(save_model(tmp_path), max_model_len=64)
    memory, forward, tables = CountedMemory(), decoder.forward, list[torch.Size]()

    def counted(batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        memory.rows.append(len(batch.token_ids))
        tables.append(batch.block_tables.shape)
        return forward(batch, kv_cache)

    monkeypatch.setattr(decoder, "forward", counted)
    config = decoder.config
    layout = KvLayout.uniform(
        model="m",
        dtype="float32",
        block_size=16,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    steps = LargestSteps(num_tokens=num_tokens, num_logits=4, num_decoding=5, replayed=replayed)
    sampler = CountingSampler()
    measured = measure_activations(decoder, sampler, layout, memory, steps)
    # Prompts of at most the longest length; sequences padded as for graphs; and both.
    assert memory.rows == [num_tokens, 8, num_tokens + 5]
    assert tables == [(num_prompts, num_blocks), (8, 16), (num_prompts + 5, 4)]
    assert sampler.num_rows == [MAX_ROWS, 8, MAX_ROWS]
    graphs = 10 * 8 + 8 * config.vocab_size * 4 if replayed else 0
    assert measured == Activations(peak=10 * (num_tokens + 5), graphs=graphs)


class FreedMemory(CountedMemory):
    """A device on which memory becomes free during the pauses."""

    def __init__(self, *amounts: int) -> None:
        super().__init__()
        self.amounts = list(amounts)
        self.num_pauses = 0

    def free(self) -> int:
        return self.amounts[0]

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.num_pauses += 1
        if len(self.amounts) > 1:
            del self.amounts[0]


@pytest.mark.parametrize(
    ("amounts", "free", "num_pauses"),
    [((90,), 90, 0), ((10, 20, 20, 50, 90), 90, 4), ((10, 20, 30), 30, 2 + 3), ((10,), 10, 3)],
)
def test_a_worker_waits_while_memory_becomes_free(amounts: tuple[int, ...], free: int, num_pauses: int) -> None:
    memory = FreedMemory(*amounts)
    assert await_free_memory(memory, 80, limit_s=0.3, pause=memory.pause) == free
    assert memory.num_pauses == num_pauses
