"""Rows of which a budget for thinking requires tokens, whatever else is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.base.errors import RequestError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams, ThinkingBudget
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleRow, Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from tests.unit.engine.cpu_sampling import cpu_sampler
from tests.unit.engine.fakes import EOS, VOCAB, expected
from tests.unit.engine.letters import CLOSING, OPENING, bounded, thinking
from tests.unit.kernels.cpu_ops import INSTRUCTION_SETS

LIMITS = SequenceLimits(max_model_len=64, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
PROMPT = [3, 4, OPENING]
OPEN = thinking(2, is_open=True)


def row(params: SamplingParams, output: list[int]) -> SampleRow:
    sequence = Sequence.from_prompt(RequestId("r"), PROMPT, params, hash_key=bytes(32))
    sequence.grammar = bounded(params)
    sequence.tokens.extend(output)
    return LIMITS.sample_row(sequence, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "top_k": 1},
        {"allowed_token_ids": (1, 2)},
        {"bad_words": ((12,), (13,), (12, 13))},
        {"logit_bias": {12: -100.0, 13: -100.0}},
        {"stop_token_ids": (12, 13), "min_tokens": 30},
        {"repetition_penalty": 5.0, "logprobs": 2},
    ],
)
def test_the_closing_comes_whatever_else_is_said_of_its_tokens(fields: dict[str, object]) -> None:
    params = SamplingParams(**({"temperature": 0.0, "thinking": OPEN} | fields))  # type: ignore[arg-type]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    samplers = [Sampler(), *(cpu_sampler(isa, 1) for isa in INSTRUCTION_SETS)]
    for index, token in enumerate(CLOSING):
        rows = [row(params, [1, 2, *CLOSING[:index]])]
        for sampler in samplers:
            [sampled] = sampler.sample(logits, rows, [0])
            assert isinstance(sampled, Sampled)
            assert sampled.token_id == token


def test_without_a_budget_that_is_used_up_the_token_is_that_of_a_row_without_one() -> None:
    for output in ([], [1], [1, 2, *CLOSING], [1, 2, *CLOSING, 4]):
        for seed in range(20):
            params = SamplingParams(temperature=1.0, seed=seed, min_tokens=9, bad_words=((4, 5),))
            logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
            rows = [row(replace(params, thinking=given), output) for given in (None, OPEN)]
            assert [each.banned for each in rows] == [rows[0].banned] * 2
            plain, same = Sampler().sample(logits.repeat(2, 1), rows, [0, 1])
            assert plain == same


def test_an_output_is_that_without_a_budget_until_it_is_used_up() -> None:
    free = expected(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3), 0, LIMITS)
    for number in (0, 1, 5):
        params = SamplingParams(
            max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, thinking=thinking(number, is_open=True)
        )
        output = expected(PROMPT, params, 0, LIMITS)
        assert output[:number] == free[:number]
        assert tuple(output[number : number + len(CLOSING)]) == CLOSING
        assert len(output) == len(free)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": 2**31}, "thinking_token_budget is 2147483648"),
        ({"closings": ()}, "number of closings"),
        ({"closings": ("x",) * 9}, "number of closings"),
        ({"closings": ("",)}, "length of each delimiter"),
        ({"opening": "x" * 129}, "length of each delimiter"),
        ({"closing_token_ids": ()}, "number of closing_token_ids"),
        ({"closing_token_ids": (VOCAB,)}, "closing_token_ids has token id 31"),
    ],
)
def test_a_budget_that_no_worker_could_keep_is_refused(wrong: dict[str, object], words: str) -> None:
    given: ThinkingBudget = replace(OPEN, **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=words):
        LIMITS.check(PROMPT, SamplingParams(thinking=given))
