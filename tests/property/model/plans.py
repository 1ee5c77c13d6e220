"""Plans: the steps, batches and chunks in which the tokens of some sequences are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model.decoder import Decoder
from tests.golden.paged import PagedRunner

#: Steps, each a list of (sequence, number of its next tokens) in the order of the batch.
Plan = list[list[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The blocks of sequences, and their previous content."""

    block_size: int = 16
    #: Seed of the choice of blocks.
    seed: int = 0
    #: Content of unwritten slots.
    fill: float = math.nan
    spare_blocks: int = 3


@dataclass(slots=True)
class Computed:
    """The results of one sequence."""

    #: Float32 logits [vocab] by position, of the last row of each chunk or of every row.
    logits: dict[int, Tensor] = field(default_factory=dict)
    #: [num_layers, 2, num_kv_heads, length, head_dim]
    kv: Tensor = field(default_factory=lambda: torch.empty(0))


def compute(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    plan: Plan,
    placement: Placement,
    *,
    every_row: bool = False,
    refill: bool = False,
) -> list[Computed]:
    """Executes a plan. The logits are those that an engine requests, of last chunks and single rows, or all.

    With `refill`, all slots that no sequence has written are overwritten before every step.
    """
    needed = sum(-(-len(text) // placement.block_size) for text in texts)
    runner = PagedRunner(
        decoder,
        num_blocks=needed + placement.spare_blocks,
        block_size=placement.block_size,
        seed=placement.seed,
        fill=placement.fill,
    )
    handles = [runner.add_sequence() for _ in texts]
    done = [0] * len(texts)
    results = [Computed() for _ in texts]
    for step in plan:
        if refill:
            runner.refill(placement.fill)
        rows = [(handles[index], texts[index][done[index] : done[index] + count]) for index, count in step]
        requested = [every_row or count == 1 or done[index] + count == len(texts[index]) for index, count in step]
        logits = iter(runner.step(rows, last_only=not every_row, requested=requested))
        for (index, count), has_logits in zip(step, requested, strict=True):
            done[index] += count
            for position in range(done[index] - (count if every_row else 1), done[index]) if has_logits else ():
                results[index].logits[position] = next(logits)
    assert done == [len(text) for text in texts], "the plan omits tokens"
    for index, result in enumerate(results):
        result.kv = runner.kv(handles[index])
    return results


def whole(decoder: Decoder, texts: Sequence[Sequence[int]], placement: Placement) -> list[Computed]:
    """Each text by itself in one step, with logits of every row: the reference of all comparisons."""
    return [compute(decoder, [text], [[(0, len(text))]], placement, every_row=True)[0] for text in texts]


def random_text(seed: int, length: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@st.composite
def chunkings(draw: st.DrawFn, length: int) -> list[int]:
    """Sizes of consecutive chunks of `length` tokens: a few cuts, and a tail of single tokens."""
    tail = draw(st.integers(0, min(length, 12)))
    cuts = draw(st.sets(st.integers(1, max(1, length - tail)), max_size=5))
    bounds = sorted({0, length - tail, *(cut for cut in cuts if cut < length - tail)})
    return [stop - start for start, stop in itertools.pairwise(bounds)] + [1] * tail


@st.composite
def plans(draw: st.DrawFn, lengths: Sequence[int]) -> Plan:
    """Interleaved chunks of all sequences: each step has some of the unfinished ones, in any order."""
    remaining = [draw(chunkings(length)) for length in lengths]
    plan: Plan = []
    while any(remaining):
        unfinished = [index for index, chunks in enumerate(remaining) if chunks]
        chosen = draw(st.lists(st.sampled_from(unfinished), unique=True, min_size=1))
        plan.append([(index, remaining[index].pop(0)) for index in chosen])
    return plan
