"""The tiny model with a KV layout of two groups, full and windowed, and a worker that computes it late.

Kernels compute no such layout yet: what this decoder stores and reads shows that block tables serve it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from pdserve.base.ids import BlockTables
from pdserve.base.layout import first_block_read
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import ReportLayers, Results, Runner, StepDecoder, TokenSampler
from pdserve.engine.step import StepPlan
from pdserve.model.batch import Batch
from tests.unit.engine.fakes import BLOCK_SIZE, FakeDecoder, Worker, read_prompt, write_prompt
from tests.unit.engine.late import LateRunner, LateWorker

Windows = tuple[int | None, ...]
#: Windows of the two groups, in tokens. The second ends within a block.
WINDOWS: Windows = (None, 6)
#: Added to the positions that the second group stores, so that no block of the other group is taken for one of its own.
MARK = 1000

Tables: TypeAlias = "list[array[int]]"


def tables_of(plan: StepPlan) -> Tables:
    """The second group's table of each row of the batch, as it is now; empty with one group."""
    return [array("q", table) for sequence in plan.scheduled() for table in sequence.other_tables]


class GroupedDecoder(FakeDecoder):
    """Stores and reads the second group as well, within its window."""

    def __init__(self) -> None:
        #: The second group's tables of the next batch.
        self.tables: Tables = []

    def contexts(self, batch: Batch, keys: Tensor, values: Tensor) -> dict[int, list[int]]:
        contexts = super().contexts(batch, keys, values)
        starts = batch.query_starts.tolist()
        if not self.tables:
            return contexts
        rows = [(row, table) for i, table in enumerate(self.tables) for row in range(starts[i], starts[i + 1])]
        slots = []
        for row, table in rows:
            position = len(contexts[row]) - 1
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            keys[block, offset], values[block, offset] = contexts[row][-1], position + MARK
            slots.append((block, offset))
        assert len(set(slots)) == len(slots), "two rows write one slot of the second group"
        for row, table in rows:
            require_window(keys, values, table, contexts[row], len(contexts[row]) - 1)
        return contexts


def require_window(keys: Tensor, values: Tensor, table: Items[int], tokens: Items[int], position: int) -> None:
    """Asserts that the second group has what the token at `position` attends to."""
    window = WINDOWS[1]
    assert window is not None
    for each in range(max(0, position - window + 1), position + 1):
        block, offset = table[each // BLOCK_SIZE], each % BLOCK_SIZE
        stored = int(keys[block, offset]), int(values[block, offset])
        assert stored == (tokens[each], each + MARK), f"position {each} of the second group holds {stored}"


class GroupedRunner(Runner):
    """Passes the second group's tables to a `GroupedDecoder`."""

    def forward(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Tensor | None:
        _decoder(self).tables = tables_of(plan)
        return super().forward(plan, batch, report_layers)


class GroupedLateRunner(LateRunner):
    """Passes the tables as they were when the step was launched."""

    def __init__(self, decoder: StepDecoder, kv_cache: KvCache, sampler: TokenSampler) -> None:
        super().__init__(decoder, kv_cache, sampler)
        self._launched: dict[int, Tables] = {}

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        self._launched[id(plan)] = tables_of(plan)
        return super().launch(plan, batch, report_layers)

    def forward(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Tensor | None:
        launched = self._launched.pop(id(plan), None)
        _decoder(self).tables = tables_of(plan) if launched is None else launched
        return super().forward(plan, batch, report_layers)


def _decoder(runner: Runner) -> GroupedDecoder:
    decoder = runner._decoder
    assert isinstance(decoder, GroupedDecoder)
    return decoder


@dataclass
class GroupedWorker(Worker):
    """A `Worker` for one or both groups."""

    decoder: GroupedDecoder = field(default_factory=GroupedDecoder)

    def make_runner(self) -> Runner:
        return GroupedRunner(self.decoder, self.cache, self.sampler)


@dataclass
class GroupedLateWorker(LateWorker):
    """A `LateWorker` for one or both groups."""

    decoder: GroupedDecoder = field(default_factory=GroupedDecoder)

    def make_late_runner(self) -> LateRunner:
        return GroupedLateRunner(self.decoder, self.cache, self.sampler)


def write_tables(cache: KvCache, tables: BlockTables, first_missing: Items[int], prompt: Items[int]) -> None:
    """Writes what a transfer brings: the blocks of each group from `first_missing` on."""
    write_prompt(cache, tables[0], first_missing[0], prompt)
    for table, first in zip(tables[1:], first_missing[1:], strict=True):
        for position in range(first * BLOCK_SIZE, len(prompt)):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            cache.tensor[block, 0, 0, 0, offset, 0] = prompt[position]
            cache.tensor[block, 0, 1, 0, offset, 0] = position + MARK


def require_stored(cache: KvCache, tables: BlockTables, num_computed: int, prompt: Items[int]) -> None:
    """Asserts that the tables hold what is to be sent of the prompt, as far as it is computed."""
    assert read_prompt(cache, tables[0], num_computed) == list(prompt[:num_computed])
    keys, values = cache.tensor[:, 0, 0, 0, :, 0], cache.tensor[:, 0, 1, 0, :, 0]
    for window, table in zip(WINDOWS[1:], tables[1:], strict=False):
        first = first_block_read(window, len(prompt), BLOCK_SIZE) * BLOCK_SIZE
        for position in range(first, num_computed):
            block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            assert (int(keys[block, offset]), int(values[block, offset])) == (prompt[position], position + MARK)
