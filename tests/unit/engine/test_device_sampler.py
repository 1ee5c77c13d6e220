"""Rows sampled on a device get the same tokens as from the host's sampler."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.devices import DEVICE, needs_triton

pytestmark = needs_triton
pytest.importorskip("triton")

from kernels.triton import sampling  # noqa: E402 - the kernels are defined at import
from pdserve.base.ids import RequestId  # noqa: E402
from pdserve.base.sampling import MAX_LOGPROBS, MAX_TOP_K, SamplingParams  # noqa: E402
from pdserve.engine import device_rows  # noqa: E402
from pdserve.engine.device_sampler import DeviceSampler, DeviceSamples  # noqa: E402
from pdserve.engine.sampler import Sampler  # noqa: E402
from pdserve.engine.sequence import Fault, Sampled, SampleFailure, SampleResult, SampleRow, Sequence  # noqa: E402
from pdserve.engine.sequence_limits import SequenceLimits  # noqa: E402
from pdserve.engine.token_rules import TokenRules  # noqa: E402
from tests.unit.engine.fakes import row  # noqa: E402
from tests.unit.engine.letters import CLOSING, bounded, thinking  # noqa: E402
from tests.unit.engine.random_grammar import RandomGrammar, with_grammar, with_rules  # noqa: E402

VOCAB = 300


def some_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=draw.choice([0.0, 0.5, 1.0, 1.7]),
        top_p=draw.choice([1.0, 0.9, 0.3]),
        top_k=draw.choice([0, 0, 1, 5, 50]),
        min_p=draw.choice([0.0, 0.0, 0.1]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.0, 0.7]),
        frequency_penalty=draw.choice([0.0, 0.0, -0.4]),
        logit_bias=draw.choice([{}, {}, {3: 4.0, 200: -100.0}]),
        min_tokens=draw.choice([0, 0, 5]),
        logprobs=draw.choice([None, None, 0, 3]),
        logprob_token_ids=draw.choice([(), (), (7,), (299, 0, 41)]),
        seed=draw.choice([0, 7, 2**63 + 11, -3]),
    )


def some_row(draw: random.Random, params: SamplingParams | None = None) -> SampleRow:
    tokens = array("q", [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 30))])
    return SampleRow(
        params=params or some_params(draw),
        choice_index=draw.randrange(3),
        tokens=tokens,
        num_prompt=draw.randrange(1, len(tokens) + 1),
        stop_ids=frozenset({1, 17}),
    )


def normal(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def assert_same(ours: list[SampleResult], theirs: list[SampleResult]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(one, Sampled) or not isinstance(other, Sampled) or one.logprobs is None:
            assert one == other
            continue
        assert other.logprobs is not None
        assert one.token_id == other.token_id
        assert (one.logprobs.rank, one.logprobs.top_ids) == (other.logprobs.rank, other.logprobs.top_ids)
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
        assert one.logprobs.top_logprobs == pytest.approx(other.logprobs.top_logprobs, abs=1e-4)


def test_tokens_of_a_prompt_are_scored_as_on_the_host_among_rows_of_other_kinds() -> None:
    draw = random.Random(5)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, logprob_token_ids=(7, 299))
    prompt = [draw.randrange(VOCAB) for _ in range(9)]
    sequence = Sequence.from_prompt(RequestId("scored"), prompt, params, hash_key=bytes(32))
    limits = SequenceLimits(max_model_len=64, vocab_size=VOCAB)
    scored = [*limits.score_rows(sequence, 0, 5), *limits.score_rows(sequence, 5, 9)]
    rows = [some_row(draw), *scored, some_row(draw)]
    logits = normal(8, len(rows))
    ours = DeviceSampler(DEVICE).sample(logits.to(DEVICE), rows, range(len(rows)))
    assert_same(ours, Sampler().sample(logits, rows, range(len(rows))))
    assert [each.token_id for each in ours[1:-1] if isinstance(each, Sampled)] == prompt[1:]


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_all_kinds_get_the_tokens_of_the_host_sampler(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(sampling, "MAX_ROWS", 3)  # Three launches.
    draw = random.Random(seed)
    rows = [some_row(draw) for _ in range(8)]
    logits = normal(seed, 5)
    logits[4, 7] = float("nan")
    logits_rows = [draw.randrange(5) for _ in rows]
    ours = DeviceSampler(DEVICE).sample(logits.to(DEVICE), rows, logits_rows)
    assert_same(ours, Sampler().sample(logits, rows, logits_rows))


def test_uploads_are_only_reused_for_the_same_rows() -> None:
    draw, sampler, plain = random.Random(9), DeviceSampler(DEVICE), Sampler()
    rows = [some_row(draw, replace(some_params(draw), temperature=1.0, repetition_penalty=1.4)) for _ in range(3)]
    for step in range(6):
        if step == 3:  # One row ends and another one is added.
            rows = [rows[0], some_row(draw), rows[2]]
        if step == 4:
            rows = rows[::-1]
        logits = normal(step, len(rows))
        logits_rows = list(range(len(rows)))
        ours = sampler.sample(logits.to(DEVICE), rows, logits_rows)
        assert_same(ours, plain.sample(logits, rows, logits_rows))
        for each, result in zip(rows, ours, strict=True):
            assert isinstance(result, Sampled)
            each.tokens.append(result.token_id)


def test_a_row_without_a_finite_maximum_fails_alone() -> None:
    draw = random.Random(1)
    rows = [some_row(draw, SamplingParams(temperature=temperature)) for temperature in (0.0, 1.0, 0.0)]
    logits = normal(0, 3)
    logits[1] = float("-inf")
    ours = DeviceSampler(DEVICE).sample(logits.to(DEVICE), rows, [0, 1, 2])
    assert [type(result) for result in ours] == [Sampled, SampleFailure, Sampled]


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_row_that_cannot_be_prepared_fails_alone_also_in_steps_ahead(penalty: float) -> None:
    # No check has seen this top_k: it stands for any defect in the preparation of a row.
    broken = SamplingParams(top_k=2**40, presence_penalty=penalty)
    penalized = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)
    draw, sampler, plain = random.Random(5), DeviceSampler(DEVICE), Sampler()
    rows = [some_row(draw, params) for params in (penalized, broken, penalized)]
    logits = [normal(step, 3) for step in range(3)]
    first = sampler.launch(logits[0].to(DEVICE), rows, range(3))
    second = sampler.launch(logits[1].to(DEVICE), rows, range(3), is_ahead=True)
    for samples, table in ((first, logits[0]), (second, logits[1])):
        results = samples.results()
        assert isinstance(results[1], SampleFailure)
        assert results[1].fault is Fault.PREPARATION
        assert results[::2] == plain.sample(table, rows[::2], [0, 2])
        for each, result in zip(rows, results, strict=True):
            each.tokens.append(result.token_id if isinstance(result, Sampled) else 0)
    # Without the broken row, all is as if it had never been there.
    assert sampler.sample(logits[2].to(DEVICE), rows[::2], [0, 1]) == plain.sample(logits[2], rows[::2], [0, 1])


def test_a_lack_of_memory_is_no_failure_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(rows: object) -> None:
        raise ValueError("a broken row") if len(list(rows)) > 1 else MemoryError  # type: ignore[call-overload]

    monkeypatch.setattr("pdserve.engine.device_rows.constant_fields", without_memory)
    rows = [some_row(random.Random(5), SamplingParams(temperature=0.0)) for _ in range(2)]
    with pytest.raises(MemoryError):
        DeviceSampler(DEVICE).sample(normal(0, 2).to(DEVICE), rows, [0, 1])


def test_rows_at_the_ends_of_the_accepted_ranges_get_the_tokens_of_the_host_sampler() -> None:
    largest = SamplingParams(
        temperature=2.0,
        top_k=MAX_TOP_K,
        min_p=1.0,
        repetition_penalty=10.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={0: 100.0, VOCAB - 1: -100.0},
        min_tokens=2**32 - 1,
        logprobs=MAX_LOGPROBS,
    )
    smallest = replace(largest, temperature=1e-3, top_p=0.0, repetition_penalty=0.01, presence_penalty=-2.0)
    rows = [some_row(random.Random(3), params) for params in (largest, smallest)]
    for each in rows:
        SequenceLimits(max_model_len=VOCAB, vocab_size=VOCAB).check(each.tokens, each.params)
    logits = normal(2, 2)
    ours = DeviceSampler(DEVICE).sample(logits.to(DEVICE), rows, [0, 1])
    assert_same(ours, Sampler().sample(logits, rows, [0, 1]))


@pytest.mark.parametrize("seed", range(3))
def test_a_row_sampled_ahead_gets_the_token_of_a_row_sampled_in_order(seed: int) -> None:
    draw, sampler, plain = random.Random(seed), DeviceSampler(DEVICE), Sampler()
    rows = [some_row(draw, replace(some_params(draw), temperature=1.0)) for _ in range(6)]
    # The ban still holds for the first launch, but not for the second.
    for each, min_tokens in zip(rows, (2, 1), strict=False):
        object.__setattr__(each, "params", replace(each.params, min_tokens=each.position + min_tokens))
    logits = [normal(10 * seed + step, len(rows)) for step in range(2)]
    logits[0][3] = float("nan")
    logits[1][:, 17] = 40.0
    logits_rows = list(range(len(rows)))
    first = sampler.launch(logits[0].to(DEVICE), rows, logits_rows)
    second = sampler.launch(logits[1].to(DEVICE), rows, logits_rows, is_ahead=True)
    assert_same(first.results(), plain.sample(logits[0], rows, logits_rows))
    assert first.token_ids[3] == -1
    for each, result in zip(rows, first.results(), strict=True):
        each.tokens.append(result.token_id if isinstance(result, Sampled) else 0)
    results = second.results()
    assert_same(results, plain.sample(logits[1], rows, logits_rows))
    assert [result.token_id == 17 for result in results[:2] if isinstance(result, Sampled)] == [False, True]


def test_penalties_include_tokens_sampled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    # Histories move to larger memory after two steps, and again when that is full.
    monkeypatch.setattr(device_rows, "SPARE_TOKENS", 2)
    sampler, plain = DeviceSampler(DEVICE), Sampler()
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    rows = [row(SamplingParams(seed=seed, temperature=1.0, **penalties), output=range(seed)) for seed in range(3)]
    rows.insert(1, row(SamplingParams(seed=9, temperature=1.0)))
    before: DeviceSamples | None = None
    for step in range(30):
        is_ahead = step not in (0, 12)  # Otherwise the host uploads the history.
        # Few distinct tokens, so that they occur again.
        logits = normal(step, len(rows))[:, :12].contiguous()
        if not is_ahead:
            take(rows, before)
        samples = sampler.launch(logits.to(DEVICE), rows, range(len(rows)), is_ahead=is_ahead)
        if is_ahead:
            take(rows, before)
        assert_same(samples.results(), plain.sample(logits, rows, range(len(rows))))
        before = samples
    assert max(Counter(rows[0].tokens[3:]).values()) > 3


def take(rows: list[SampleRow], samples: DeviceSamples | None) -> None:
    for each, result in zip(rows, samples.results() if samples else (), strict=samples is not None):
        assert isinstance(result, Sampled)
        each.tokens.append(result.token_id)


def test_sampling_ahead_of_other_rows_is_an_assertion() -> None:
    draw, sampler = random.Random(0), DeviceSampler(DEVICE)
    rows = [some_row(draw) for _ in range(2)]
    sampler.launch(normal(0, 2).to(DEVICE), rows, range(2))
    with pytest.raises(AssertionError, match="cannot sample ahead"):
        sampler.launch(normal(1, 2).to(DEVICE), rows[::-1], range(2), is_ahead=True)


def test_rows_with_grammars_get_the_tokens_of_the_host() -> None:
    """Some rows of a step have a grammar; one of which nothing is allowed fails alone."""
    draw, sampler = random.Random(6), DeviceSampler(DEVICE)
    rows = [some_row(draw) for _ in range(12)]
    for index, share in ((1, 0.02), (4, 0.5), (5, 1.0), (9, 0.0)):
        rows[index] = with_grammar(rows[index], RandomGrammar(index, VOCAB, share))
    for step in range(3):
        logits = normal(step, len(rows))
        expected = Sampler().sample(logits, rows, range(len(rows)))
        assert_same(expected, sampler.sample(logits.to(DEVICE), rows, range(len(rows))))
        failed = expected[9]
        assert isinstance(failed, SampleFailure)
        assert failed.fault is Fault.REQUEST
        for each in rows:
            each.tokens.append(draw.randrange(VOCAB))


def test_rows_with_rules_get_the_tokens_of_the_host() -> None:
    """Lists of allowed tokens and bad words, with a grammar and without, beside rows that have neither."""
    draw, sampler = random.Random(8), DeviceSampler(DEVICE)
    rows = [some_row(draw) for _ in range(8)]
    for index in (1, 2, 5):
        rows[index] = with_rules(rows[index], index, VOCAB)
    rows[2] = with_grammar(rows[2], RandomGrammar(2, VOCAB, 0.5))
    for step in range(3):
        logits = normal(step, len(rows))
        expected = Sampler().sample(logits, rows, range(len(rows)))
        assert_same(expected, sampler.sample(logits.to(DEVICE), rows, range(len(rows))))
        for each in rows:
            each.tokens.append(draw.choice([each.tokens[-1], draw.randrange(VOCAB)]))


def test_rows_with_a_budget_for_thinking_get_the_tokens_of_the_host() -> None:
    """Beside rows without one, also where the budget is not used up and nothing is edited."""
    draw, sampler = random.Random(9), DeviceSampler(DEVICE)
    rows = [some_row(draw) for _ in range(6)]
    for index, number in ((1, 0), (2, 1), (4, 3)):
        grammar = bounded(SamplingParams(thinking=thinking(number, is_open=True)), VOCAB)
        assert grammar is not None
        rows[index] = replace(rows[index], num_prompt=len(rows[index].tokens), grammar=grammar.start())
    for step in range(8):
        logits = normal(step, len(rows))
        expected = Sampler().sample(logits, rows, range(len(rows)))
        assert_same(expected, sampler.sample(logits.to(DEVICE), rows, range(len(rows))))
        for each, result in zip(rows, expected, strict=True):
            assert isinstance(result, Sampled)
            each.tokens.append(result.token_id)
    assert tuple(rows[1].tokens[-8:-5]) == CLOSING
    assert tuple(rows[4].tokens[-5:-2]) == CLOSING


def test_a_list_of_allowed_tokens_is_an_edit_by_itself() -> None:
    sampler, logits = DeviceSampler(DEVICE), normal(0, 1)
    one = row(SamplingParams(temperature=1.0, seed=2))
    listed = TokenRules(SamplingParams(allowed_token_ids=(7, 250))).allowed(VOCAB)
    [result] = sampler.sample(logits.to(DEVICE), [replace(one, listed=listed)], [0])
    assert isinstance(result, Sampled)
    assert result.token_id in (7, 250)
