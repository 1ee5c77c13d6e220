"""A tiny deterministic model, and a worker that engine tests step by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.ids import BlockId, RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import ChoiceTokens, SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.pace import Pace
from pdserve.engine.runner import Runner, StepDecoder, TokenSampler
from pdserve.engine.sampler import Sampler
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sampled, SampleRow, Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import StepEvents, StepPlan
from pdserve.model.batch import Batch
from pdserve.model.thinking import OutputGrammar
from tests.unit.engine.letters import bounded

VOCAB = 31
EOS = 7
BLOCK_SIZE = 4
KEY = bytes(32)
CPU = torch.device("cpu")


def fake_logits(context: Items[int]) -> Tensor:
    """Logits that depend on every token of the context and its position: float32 [VOCAB]."""
    state = 0x9E3779B9
    for token in context:
        state = ((state ^ token) * 0x01000193 + 0x7F4A7C15) & 0xFFFFFFFF
    ids = np.arange(1, VOCAB + 1, dtype=np.uint64)
    mixed = (ids * np.uint64(2654435761) + np.uint64(state)) * np.uint64(40503) % np.uint64(65521)
    return torch.from_numpy((mixed % np.uint64(4096)).astype(np.float32) / 512)


class FakeDecoder:
    """Stores token ids as K and positions as V, and reads its context back through the block tables.

    So a wrong slot, a lost copy, or a stale or foreign block changes the logits or fails an assertion.
    """

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        keys = kv_cache[:, 0, 0, 0, :, 0]
        values = kv_cache[:, 0, 1, 0, :, 0]
        blocks, offsets = batch.slot_mapping // BLOCK_SIZE, batch.slot_mapping % BLOCK_SIZE
        assert len(batch.slot_mapping.unique()) == len(batch.slot_mapping), "two rows write one slot"
        keys[blocks, offsets] = batch.token_ids.to(torch.float32)
        values[blocks, offsets] = batch.positions.to(torch.float32)
        contexts = self.contexts(batch, keys, values)
        rows = batch.logits_rows.tolist()
        return torch.stack([fake_logits(contexts[row]) for row in rows]) if rows else torch.empty(0, VOCAB)

    def contexts(self, batch: Batch, keys: Tensor, values: Tensor) -> dict[int, list[int]]:
        """The tokens up to each row of the batch."""
        contexts: dict[int, list[int]] = {}
        for index, length in enumerate(batch.context_lens.tolist()):
            table = batch.block_tables[index]
            tokens = keys[table].flatten()[:length].to(torch.int64).tolist()
            positions = values[table].flatten()[:length].to(torch.int64).tolist()
            assert positions == list(range(length)), f"context of sequence {index} is {positions}"
            first, stop = batch.query_starts[index : index + 2].tolist()
            for row in range(first, stop):
                contexts[row] = tokens[: length - (stop - 1 - row)]
        return contexts


def layout(model: str = "fake") -> KvLayout:
    return KvLayout.uniform(
        model=model, dtype="float32", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=1
    )


def limits(max_model_len: int = 64) -> SequenceLimits:
    return SequenceLimits(max_model_len=max_model_len, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))


def expected(
    prompt: Items[int],
    params: SamplingParams,
    choice: int,
    bounds: SequenceLimits,
    grammar: OutputGrammar | None = None,
) -> list[int]:
    """The completion of one choice, computed alone, token by token, without any cache."""
    sequence = Sequence.from_prompt(RequestId("oracle"), prompt, params, hash_key=KEY)
    while True:
        # A new state for each token: what may follow is the same however it is reached.
        sequence.grammar = grammar or bounded(params)
        row = bounds.sample_row(sequence, choice)
        (result,) = Sampler().sample(fake_logits(sequence.tokens).unsqueeze(0), [row], [0])
        assert isinstance(result, Sampled)
        reason = bounds.choice_tokens(sequence, choice, result).finish_reason
        sequence.tokens.append(result.token_id)
        if reason is not None:
            return list(sequence.tokens[len(prompt) :])


def row(params: SamplingParams, *, position: int = 0, choice: int = 0, output: Items[int] = ()) -> SampleRow:
    """A row to sample after the prompt [1, 2, 3] and `position` tokens, of which `output` are the last."""
    padding = [4] * (position - len(output))
    tokens = array("q", [1, 2, 3, *padding, *output])
    return SampleRow(params=params, choice_index=choice, tokens=tokens, num_prompt=3)


@dataclass
class Worker:
    """A pool, a cache and a scheduler, stepped by hand; records all reported events."""

    pool: BlockPool
    scheduler: Scheduler
    decoder: StepDecoder = field(default_factory=FakeDecoder)
    kv_layout: KvLayout = field(default_factory=lambda: layout())
    sampler: TokenSampler = field(default_factory=Sampler)
    device: torch.device = CPU
    pace: Pace = field(default_factory=Pace)
    plans: list[StepPlan] = field(default_factory=list)
    seen: list[StepEvents] = field(default_factory=list)
    reported: dict[RequestId, dict[int, list[ChoiceTokens]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KvCache(self.kv_layout, self.pool.num_blocks, self.device)
        self.runner = self.make_runner()

    def make_runner(self) -> Runner:
        return Runner(self.decoder, self.cache, self.sampler)

    def step(self) -> StepEvents:
        plan = self.scheduler.schedule(self.pace)
        self.plans.append(plan)
        results = self.runner.launch(plan, self.runner.build(plan))
        events = self.scheduler.update(plan, results())
        self.note(events)
        return events

    def interrupted_step(self) -> tuple[StepEvents, set[RequestId]]:
        """A step that has written KV and computed nothing; also returns the requests that it was for."""
        plan = self.scheduler.schedule(self.pace)
        self.plans.append(plan)
        self.runner.forward(plan, self.runner.build(plan))
        unwanted = {sequence.request_id for sequence in plan.scheduled()}
        events = self.scheduler.update(plan.without(unwanted), [])
        self.note(events)
        return events, unwanted

    def note(self, events: StepEvents) -> None:
        """Record the events of a step."""
        self.seen.append(events)
        for tokens in events.tokens:
            for choice in tokens.choices:
                self.reported.setdefault(tokens.request_id, {}).setdefault(choice.choice_index, []).append(choice)

    def run(self, max_steps: int = 500) -> list[StepEvents]:
        """Step until the scheduler has no work."""
        events = []
        while self.scheduler.has_work():
            assert len(events) < max_steps, "the scheduler never runs out of work"
            events.append(self.step())
        return events

    def tokens(self, request_id: RequestId, choice: int = 0) -> list[int]:
        """All reported tokens of one choice. Asserts that their numbers have no gaps."""
        messages = self.reported.get(request_id, {}).get(choice, [])
        flat: list[int] = []
        for message in messages:
            assert message.first_index == messages[0].first_index + len(flat)
            flat.extend(message.token_ids)
        return flat


def write_prompt(cache: KvCache, table: Items[BlockId], first_block: int, prompt: Items[int]) -> None:
    """Writes the KV of the prompt's blocks from `first_block` on, as a transfer does."""
    for position in range(first_block * BLOCK_SIZE, len(prompt)):
        block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        cache.tensor[block, 0, 0, 0, offset, 0] = prompt[position]
        cache.tensor[block, 0, 1, 0, offset, 0] = position


def read_prompt(cache: KvCache, table: Items[BlockId], num_tokens: int) -> list[int]:
    """The tokens whose KV is stored. Asserts that their positions are right."""
    stored = cache.tensor[list(table), 0, :, 0, :, 0].to(torch.int64)
    assert stored[:, 1].flatten()[:num_tokens].tolist() == list(range(num_tokens))
    tokens: list[int] = stored[:, 0].flatten()[:num_tokens].tolist()
    return tokens
