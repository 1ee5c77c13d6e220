"""What may follow in an output, by a small vocabulary: masks, their end, replay, and what is refused."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from threading import Thread
from time import thread_time

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from pdserve.base.errors import RequestError
from pdserve.model import grammar as grammar_module
from pdserve.model.grammar import Grammar, GrammarFailed, GrammarState, GrammarVocabulary, TokenBits
from pdserve.model.grammar_check import grammar_problem
from pdserve.model.tokenizer import Tokenizer
from tests.unit.model.vocabularies import byte_level

#: More than the tokenizer has, as in models with a padded vocabulary.
VOCAB = 320
TOKENIZER = byte_level()
END = TOKENIZER.token_to_id("<|end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER, (END,))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, VOCAB)


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


def ids(bits: TokenBits) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def texts(tokenizer: Tokenizer, bits: TokenBits) -> set[str]:
    return {tokenizer.token_str(token) for token in ids(bits)}


def behind(grammar: Grammar, tokens: list[int], **options: tuple[int, ...]) -> TokenBits:
    """What may follow these tokens, computed at once."""
    return grammar.start().allowed(array("q", tokens), 0, **options)


def test_only_tokens_that_the_grammar_allows_may_come(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(regex("(he|a)llo?"))
    assert texts(tokenizer, behind(grammar, [])) == {"he", "h", "a"}
    # What is forced comes as the tokens that a text has.
    assert texts(tokenizer, behind(grammar, tokenizer.encode("a", False))) == {"ll"}


def test_an_output_that_is_complete_may_only_end(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(regex("hell"))
    assert ids(behind(grammar, tokenizer.encode("hell", False))) == {END}
    # Also where the end comes too early for the request.
    assert ids(behind(grammar, tokenizer.encode("hell", False), banned=(END,))) == {END}


def test_banned_tokens_may_not_come_where_others_may(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(regex("l{2,4}"))
    two = tokenizer.encode("ll", False)
    assert END in ids(behind(grammar, two))
    assert texts(tokenizer, behind(grammar, two, banned=(END, 5))) == {"ll", "l"}


def test_special_and_missing_tokens_never_come(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Fails if a special token counts as the text that it is written as."""
    allowed = ids(behind(vocabulary.compile(regex("(.|\n)*")), []))
    assert allowed - {END} <= {token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)}
    assert {*tokenizer.encode("hello two words<tag>", False), END} <= allowed
    grammar = vocabulary.compile(regex(r"<\|end\|>"))
    assert texts(tokenizer, behind(grammar, [])) == {"<"}


def test_bits_do_not_depend_on_how_the_state_was_reached(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Preemption, handover and recovery replay all tokens; a decoding sequence adds one after the other."""
    grammar = vocabulary.compile(schema({"type": "object", "properties": {"a": {"enum": ["he", "hello", 3]}}}))
    tokens = array("q", tokenizer.encode('{"a": "hello"}', False))
    growing, following = array("q", [7, 7]), grammar.start()
    for token in tokens:
        one_by_one = following.allowed(growing, 2).copy()
        assert np.array_equal(one_by_one, behind(grammar, growing.tolist()[2:]))
        assert token in ids(one_by_one)
        growing.append(token)


def test_states_of_one_grammar_do_not_affect_each_other(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(regex("(he|ll)*"))
    before = behind(grammar, []).copy()
    other = grammar.start()
    other.allowed(array("q", tokenizer.encode("hehe", False)), 0)
    assert np.array_equal(behind(grammar, []), before)


def test_tokens_that_do_not_match_are_an_error_for_good(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    state: GrammarState = vocabulary.compile(regex("he")).start()
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="tokens 0 to 0 cannot follow"):
            state.allowed(array("q", tokenizer.encode("ll", False)), 0)


@pytest.mark.parametrize("text", ["", '{"grammars": []}', "[", "\x00", "start: /(/"])
def test_a_text_that_is_no_grammar_is_refused(vocabulary: GrammarVocabulary, text: str) -> None:
    assert grammar_problem(text)
    with pytest.raises(RequestError, match="The grammar of the output is not valid"):
        vocabulary.compile(text)


@pytest.mark.parametrize("limit", ["initial_lexer_fuel", "step_lexer_fuel"])
def test_a_grammar_that_takes_too_much_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, vocabulary: GrammarVocabulary, limit: str
) -> None:
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(**{limit: 1}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="The grammar of the output"):
        vocabulary.compile(regex("(he|l{3,9}o){2,8}[a-z]*"))


def test_a_grammar_that_takes_too_long_is_refused_or_ends_its_output(
    tokenizer: Tokenizer,
) -> None:
    """Not all work is counted. What is not takes seconds, for each token."""
    times = iter([0.0, 0.2, 1.0, 1.3, 2.0, 2.5])
    vocabulary = GrammarVocabulary(tokenizer, VOCAB, lambda: next(times))
    state = vocabulary.compile(regex("[eh]*")).start()
    assert ids(state.allowed(array("q"), 0))  # Found when the grammar was read.
    with pytest.raises(GrammarFailed, match="300 ms to find what may follow token 0"):
        state.allowed(array("q", tokenizer.encode("h", False)), 0)
    with pytest.raises(RequestError, match=r"cannot be followed: it takes .*\. Repeat less"):
        vocabulary.compile(regex("[eh]*"))


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_lark("start: A\nA: B{1000}\nB: C{1000}\nC: /x{1000}/"),
        LLMatcher.grammar_from_lark('start: a{1000}\na: b{1000}\nb: "x"{1000}'),
        LLMatcher.grammar_from_lark("start: " + '"a"?' * 60_000),
    ],
)
def test_what_explodes_is_refused_when_it_is_read(tokenizer: Tokenizer, grammar: str) -> None:
    """Each token of the first would take a second, and the third overflows the library's stack."""
    vocabulary = GrammarVocabulary(tokenizer, VOCAB, thread_time)
    with pytest.raises(RequestError) as refused:
        vocabulary.compile(grammar)
    assert len(str(refused.value)) < 400


def test_what_is_forced_is_known_ahead(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    """Each forced token is the only one that may come, as without looking ahead."""
    text = tokenizer.encode("hello hello hello hello", False)
    state = vocabulary.compile(regex("hello hello hello hello(he|a)*")).start()
    output = array("q")
    for token in text:
        assert ids(state.allowed(output, 0)) == {token}
        output.append(token)
    assert len(ids(state.allowed(output, 0))) > 2
    # Some other way to spell it, as a worker without the tokenizer's own might have.
    letters = [tokenizer.encode(letter, False)[0] for letter in "hel"]
    other = vocabulary.compile(regex("hello hello hello hello(he|a)*")).start()
    assert ids(other.allowed(array("q", letters), 0)) == ids(behind(vocabulary.compile(regex("(lo) hello.*")), []))


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(hello){3,5}( two words| two|<tag>he(l|lo)*)?"),
        schema(
            {"type": "object", "properties": {"hello": {"enum": ["hello", "hello two"]}, "b": {"const": [1, 2, "ll"]}}}
        ),
        schema({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}),
        LLMatcher.grammar_from_lark('start: "hello" (A | B)* "lo"\nA: "hehe" /l{4}/\nB: /[ab]+/ "hello"'),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_looking_ahead_changes_no_mask(vocabulary: GrammarVocabulary, grammar: str, seed: int) -> None:
    state, output, rng = vocabulary.compile(grammar).start(), array("q"), random.Random(seed)
    matcher = LLMatcher(vocabulary._tokenizer, grammar, log_level=0, limits=grammar_module.LIMITS)
    expected: TokenBits = np.zeros(VOCAB // 32, np.uint32)
    for _ in range(60):
        matcher.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
        bits = state.allowed(output, 0)
        assert np.array_equal(bits, expected)
        token = rng.choice(sorted(ids(bits)))
        if token == END:
            return
        forced = state.forced(token)
        output.append(token)
        for following in forced:  # As a scheduler does that appends them at once.
            assert matcher.consume_tokens([token])
            matcher.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
            assert ids(expected) == {following}
            output.append(token := following)
        assert matcher.consume_tokens([token])


def test_what_is_found_on_another_thread_is_the_same(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    grammar = vocabulary.compile(schema({"type": "object", "properties": {"a": {"enum": ["he", "hello", 3]}}}))
    state, output = grammar.start(), array("q")
    assert state.is_found(output, 0)
    for token in tokenizer.encode('{"a": "hello"}', False):
        output.append(token)
        assert not state.is_found(output, 0)
        thread = Thread(target=state.find, args=(output, 0))
        thread.start()
        thread.join()
        assert state.is_found(output, 0)
        assert np.array_equal(state.allowed(output, 0), behind(grammar, output.tolist()))


@pytest.mark.parametrize(
    "pattern", ["((a{0,500}){0,500}){0,500}", "(a|b|c){0,100000}x{10000}", "[ab]*a[ab]{3000}", "((.|\n)*a){200}"]
)
def test_no_pattern_is_a_way_to_stop_a_worker(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer, pattern: str
) -> None:
    """Repetitions that make automata of millions of states: no more than a limit of work is done at a token."""
    state, output = vocabulary.compile(regex(pattern)).start(), array("q")
    for token in tokenizer.encode("aaaaaaaa", False):
        assert token in ids(state.allowed(output, 0))
        output.append(token)


def test_a_tokenizer_that_may_not_encode_gives_masks(tmp_path: Path) -> None:
    """Forced text is then tokenized by longest match. Fails if `encode` is called."""
    tokenizer = Tokenizer(TOKENIZER, (END,), can_encode=False)
    tokenizer.encode = None  # type: ignore[assignment, method-assign]
    grammar = GrammarVocabulary(tokenizer, VOCAB).compile(regex("hello wo"))
    assert "he" in texts(tokenizer, behind(grammar, []))
