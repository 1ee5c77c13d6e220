"""What `allowed_token_ids` and `bad_words` leave at each position of an output, alone and with a grammar."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Fault, Sampled, SampleFailure, SampleRow, Sequence
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.token_rules import TokenRules
from pdserve.model.grammar import Grammar, GrammarVocabulary, TokenBits
from pdserve.model.tokenizer import Tokenizer
from tests.unit.model.vocabularies import byte_level

VOCAB = 320
TOKENIZER = byte_level()
END = TOKENIZER.token_to_id("<|end|>")
LIMITS = SequenceLimits(max_model_len=64, vocab_size=VOCAB, eos_token_ids=frozenset({END}))
PROMPT = [5, 6, 7]


def row(params: SamplingParams, output: list[int], grammar: Grammar | None = None) -> SampleRow:
    sequence = Sequence.from_prompt(RequestId("r"), PROMPT, params, hash_key=bytes(32))
    sequence.grammar = grammar
    sequence.tokens.extend(output)
    return LIMITS.sample_row(sequence, 0)


def ids(bits: TokenBits | None) -> set[int]:
    assert bits is not None
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {9}),
        ([1], {9}),
        ([1, 2], {3, 4, 9}),
        ([8, 1, 2], {3, 4, 9}),
        ([2], {4, 9}),
        ([1, 2, 3], {9}),
        ([1, 2, 8], {9}),
        ([2, 2], {4, 9}),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_behind_its_others(output: list[int], banned: set[int]) -> None:
    params = SamplingParams(bad_words=((1, 2, 3), (2, 4), (9,)))
    assert set(row(params, output).banned) == banned


def test_a_bad_word_does_not_start_in_the_prompt() -> None:
    params = SamplingParams(bad_words=((7, 8), (6, 7, 1, 2)))
    assert row(params, []).banned == ()
    assert row(params, [1]).banned == ()
    assert row(params, [7]).banned == (8,)


def test_bans_are_those_of_a_search_over_all_words() -> None:
    draw = random.Random(4)
    for _ in range(300):
        words = tuple(tuple(draw.randrange(4) for _ in range(draw.randrange(1, 5))) for _ in range(6))
        output = [draw.randrange(4) for _ in range(draw.randrange(9))]
        expected = {word[-1] for word in words if len(word) == 1 or output[1 - len(word) :] == list(word[:-1])}
        rules = TokenRules.of(SamplingParams(bad_words=words))
        assert rules is not None
        assert set(rules.forbidden(array("q", [*PROMPT, *output]), len(PROMPT))) == expected, (words, output)


def test_only_listed_tokens_are_sampled_and_none_that_is_banned() -> None:
    logits = torch.zeros(1, VOCAB)
    for seed in range(40):
        params = SamplingParams(allowed_token_ids=(3, 33, 300), bad_words=((33,), (300, 3)), temperature=1.0, seed=seed)
        [sampled] = Sampler().sample(logits, [row(params, [300])], [0])
        assert sampled == Sampled(token_id=300)


def test_a_row_without_any_token_fails_with_its_reason() -> None:
    params = SamplingParams(allowed_token_ids=(3,), bad_words=((4, 3),), temperature=0.0)
    [failed] = Sampler().sample(torch.zeros(1, VOCAB), [row(params, [4])], [0])
    assert isinstance(failed, SampleFailure)
    assert "allowed_token_ids" in failed.reason
    assert failed.fault is Fault.REQUEST


def test_a_row_with_rules_fails_because_of_its_logits_where_the_rules_allow_a_token() -> None:
    params = SamplingParams(allowed_token_ids=(3, 5), bad_words=((4, 3),))
    [failed] = Sampler().sample(torch.full((1, VOCAB), float("nan")), [row(params, [4])], [0])
    assert isinstance(failed, SampleFailure)
    assert failed.fault is Fault.LOGITS


def test_choices_share_the_bits_of_a_request() -> None:
    params = SamplingParams(allowed_token_ids=(1, 319))
    sequence = Sequence.from_prompt(RequestId("r"), PROMPT, params, hash_key=bytes(32))
    first, second = LIMITS.sample_row(sequence, 0), LIMITS.sample_row(sequence, 1)
    assert ids(first.allowed()) == {1, 319}
    assert first.allowed() is second.allowed()


def test_what_is_banned_depends_on_the_next_token_where_bad_words_have_several() -> None:
    for params, depends in (
        (SamplingParams(allowed_token_ids=(1, 2)), False),
        (SamplingParams(bad_words=((1,),)), False),
        (SamplingParams(bad_words=((1, 2),)), True),
    ):
        sequence = Sequence.from_prompt(RequestId("r"), PROMPT, params, hash_key=bytes(32))
        sequence.sampling = LIMITS.sample_row(sequence, 0)
        assert sequence.sampling.follows_next is depends


def test_a_grammar_and_a_list_hold_together_and_a_complete_output_may_end() -> None:
    vocabulary = GrammarVocabulary(Tokenizer(TOKENIZER, (END,)), VOCAB)
    text = LLMatcher.grammar_from_regex("[ab]{2}")
    [a], [b] = (TOKENIZER.encode(letter).ids for letter in "ab")
    params = SamplingParams(allowed_token_ids=(a, 9), bad_words=((b,),), grammar=text)
    grammar = vocabulary.compile(text)
    assert ids(row(params, [], grammar).allowed()) == {a}
    assert row(params, [], grammar).banned == (b,)
    assert ids(row(params, [a, a], grammar).allowed()) == {END}
    impossible = row(SamplingParams(allowed_token_ids=(9,), grammar=text), [], grammar)
    [failed] = Sampler().sample(torch.zeros(1, VOCAB), [impossible], [0])
    assert isinstance(failed, SampleFailure)
    assert failed.fault is Fault.REQUEST
