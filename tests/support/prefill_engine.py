"""A prefill worker's engine without its service, with a real decoder."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.base.layout import KvLayout
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.pace import Pace
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import StepEvents
from pdserve.model.decoder import Decoder
from prefill_svc.request import PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler

BLOCK_SIZE = 8


class PrefillEngine:
    """Computes the prompts of a scheduler."""

    def __init__(self, decoder: Decoder, num_tokens: int, *, step_tokens: int, scored_tokens: int = 13) -> None:
        """With blocks for prompts of `num_tokens` in total, each rounded up."""
        config, dtype = decoder.config, str(decoder.dtype).removeprefix("torch.")
        layout = KvLayout.uniform(
            model="tiny",
            dtype=dtype,
            block_size=BLOCK_SIZE,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        limits = SequenceLimits(max_model_len=decoder.max_model_len, vocab_size=config.vocab_size)
        self.scheduler = PrefillScheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            PrefillSchedulerConfig(limits=limits, max_num_batched_tokens=step_tokens, max_scored_tokens=scored_tokens),
        )
        sampler = Sampler() if decoder.row_sampler is None else CpuSampler(decoder.row_sampler)
        self._runner = Runner(decoder, KvCache(layout, num_blocks, decoder.device), sampler)

    def run(self) -> Iterator[StepEvents]:
        """The events of each step, until there is no work. No prompt fails."""
        while self.scheduler.has_work():
            plan = self.scheduler.schedule(Pace())
            events = self.scheduler.update(plan, self._runner.launch(plan, self._runner.build(plan))())
            assert not events.failures
            yield events


def rounded(num_tokens: int) -> int:
    """Number of tokens that fit into the blocks for this many."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE
