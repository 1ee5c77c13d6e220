"""Edited logits bit for bit, and histories that grow on the device."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from tests.support.devices import DEVICE, needs_triton

# isort: split
from kernels.triton.penalties import add_to_history, edit_logits
from pdserve.base.sampling import SamplingParams
from pdserve.engine.logits import edited_logits
from pdserve.engine.sequence import SampleRow
from tests.unit.engine.fakes import row
from tests.unit.engine.random_grammar import RandomGrammar, with_grammar
from tests.unit.kernels.triton.sampled import sample_rows

pytestmark = needs_triton

VOCAB = 300
EDITS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, presence_penalty=0.4, frequency_penalty=-0.1),
    SamplingParams(presence_penalty=-1.1),
    SamplingParams(frequency_penalty=0.3),
    SamplingParams(logit_bias={5: 4.0, 6: -100.0, 299: 0.1}),
    SamplingParams(logit_bias={index: index / 7 for index in range(0, 300, 2)}, repetition_penalty=2.0, min_tokens=99),
    SamplingParams(min_tokens=99),
]


def rows_of(seed: int) -> list[SampleRow]:
    generator = np.random.default_rng(seed)
    return [
        SampleRow(
            params=params,
            choice_index=0,
            # Few distinct tokens, so that they repeat.
            tokens=array("q", generator.integers(0, 40, 30).tolist()),
            num_prompt=17,
            stop_ids=frozenset({5, 77}),
        )
        for params in EDITS
    ]


def test_edited_logits_have_the_bits_of_the_reference() -> None:
    rows = rows_of(1)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    edited, is_edited = edit_logits(logits.to(DEVICE), sample_rows(rows, list(range(len(rows)))))
    assert is_edited.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    for index in range(1, len(rows)):
        expected = edited_logits(logits[index].numpy(), rows[index])
        assert edited[index].tolist() == expected.tolist(), f"row {index}"


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_logits_of_tokens_that_a_grammar_does_not_allow_are_minus_infinity(share: float) -> None:
    rows = [
        with_grammar(each, RandomGrammar(index, VOCAB, share)) if index % 2 == 0 else each
        for index, each in enumerate(rows_of(2))
    ]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    edited, is_edited = edit_logits(logits.to(DEVICE), sample_rows(rows, list(range(len(rows)))))
    assert is_edited.tolist() == [1] * len(rows)
    for index, each in enumerate(rows):
        expected = edited_logits(logits[index].numpy(), each)
        assert edited[index].tolist() == expected.tolist(), f"row {index}"


def test_a_history_that_grew_on_the_device_equals_a_recount() -> None:
    rows = [
        row(SamplingParams(presence_penalty=0.1), output=[9]),
        row(SamplingParams()),
        row(SamplingParams(frequency_penalty=0.5)),
        row(SamplingParams(repetition_penalty=1.5), output=[3, 4]),
    ]
    described = sample_rows(rows, [0, 1, 2, 3])
    for step in ([9, 9, 1, 3], [8, 9, 7, -1], [8, 9, 7, 12]):
        add_to_history(described, torch.tensor(step, device=DEVICE))
        for each, token in zip(rows, step, strict=True):
            if token >= 0:
                each.tokens.append(token)
    expected = sample_rows(rows, [0, 1, 2, 3])
    for slot in range(4):
        actual, counted = (
            sorted(
                zip(
                    each.history.ids[slot].tolist()[: int(each.history.lens[slot])],
                    each.history.counts[slot].tolist(),
                    strict=False,
                )
            )
            for each in (described, expected)
        )
        assert actual == counted, f"slot {slot}"


def test_a_full_history_slot_leaves_other_slots_unchanged() -> None:
    rows = [row(SamplingParams(presence_penalty=0.1)), row(SamplingParams(presence_penalty=0.1))]
    described = sample_rows(rows, [0, 1], capacity=3)
    before = described.history.ids.clone()
    add_to_history(described, torch.tensor([17, 2], device=DEVICE))
    assert torch.equal(described.history.ids, before)
    assert described.history.counts.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]] or described.history.counts.sum() == 1


@pytest.mark.parametrize("tokens", [[-1, -1]])
def test_a_failed_row_adds_nothing(tokens: list[int]) -> None:
    rows = [row(SamplingParams(presence_penalty=0.1)), row(SamplingParams())]
    described = sample_rows(rows, [0, 1])
    add_to_history(described, torch.tensor(tokens, device=DEVICE))
    assert described.history.lens.tolist() == [3, 0]
