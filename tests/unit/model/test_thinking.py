"""When an output's thinking has to end, by a small vocabulary: the bound, delimiters in pieces, replay, grammars."""

from __future__ import annotations

import codecs
import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher

from pdserve.base.sampling import ThinkingBudget
from pdserve.model.grammar import Grammar, GrammarVocabulary, TokenBits
from pdserve.model.thinking import BoundedThinking, ThinkingState, ThinkingVocabulary
from pdserve.model.tokenizer import Tokenizer
from tests.unit.model.vocabularies import byte_level

#: More than the tokenizer has, as in models with a padded vocabulary.
VOCAB = 320
RAW = byte_level()
END = RAW.token_to_id("<|end|>")
TOKENIZER = Tokenizer(RAW, (END,))
VOCABULARY = ThinkingVocabulary(TOKENIZER, VOCAB)
CLOSING = tuple(TOKENIZER.encode("</t>", False))
BUDGET = ThinkingBudget(max_tokens=5, is_open=False, opening="<t>", closings=("</t>",), closing_token_ids=CLOSING)
OPEN = replace(BUDGET, is_open=True)


def state(budget: ThinkingBudget = BUDGET, grammar: Grammar | None = None) -> ThinkingState:
    return BoundedThinking(budget, VOCABULARY, grammar).start()


def ids(bits: TokenBits | None) -> set[int] | None:
    """None: any token."""
    return None if bits is None else set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def required(output: str | list[int], budget: ThinkingBudget = BUDGET) -> str | None:
    """What has to follow the output; None: anything may."""
    tokens = TOKENIZER.encode(output, False) if isinstance(output, str) else output
    found = ids(state(budget).required(array("q", [7, 7, *tokens]), 2))
    return None if found is None else "|".join(sorted(TOKENIZER.token_str(token) for token in found))


@pytest.mark.parametrize(
    ("output", "closing"),
    [
        ("", None),
        ("abcdefgh", None),
        ("<t>abcd", None),
        ("<t>abcde", "<"),
        # A delimiter is the same text whichever tokens spell it, and the merge `he` counts as one.
        ("<t>abcdhe", "<"),
        ("xy<t>abcde", "<"),
        ("<t>abcde<", "/"),
        ("<t>abcde</", "t"),
        ("<t>abcde</t", ">"),
        ("<t>abcde</t>", None),
        ("<t>abcde</t>and more text", None),
        ("<t>ab</t>and more text", None),
        # The head of a closing that the model has started is not repeated, and what only looks like one is.
        ("<t>abc</", "t"),
        ("<t>abc<<", "/"),
        ("<t>abcd</x", "<"),
        # All thinking counts together. What comes behind an exhausted bound ends at once.
        ("<t>ab</t>x<t>", "<"),
        ("<t>a</t>x<t>", None),
        ("<t>a</t>x<t>b", "<"),  # The pieces of a closing count, too.
        ("<t>abcde</t>x<t>", "<"),
        ("<t>abcde</t>x<t", None),
    ],
)
def test_the_end_is_required_where_the_bound_is_reached(output: str, closing: str | None) -> None:
    assert required(output) == closing


def test_a_bound_of_nothing_ends_thinking_where_it_opens() -> None:
    assert required("", replace(OPEN, max_tokens=0)) == "<"
    assert required("</t>x", replace(OPEN, max_tokens=0)) is None
    assert required("", replace(BUDGET, max_tokens=0)) is None
    assert required("<t>", replace(BUDGET, max_tokens=0)) == "<"


def test_the_prompt_may_have_opened_it() -> None:
    assert required("abcd", OPEN) is None
    assert required("abcde", OPEN) == "<"
    # The prompt's own tokens are no output.
    assert state(OPEN).required(array("q", [*TOKENIZER.encode("abcdefgh", False), 4]), 8) is None


def test_another_closing_than_the_required_one_ends_it_too_and_may_open_the_next() -> None:
    budget = replace(BUDGET, opening="<c>a<m>", closings=("</t>", "<c>"), max_tokens=9)
    assert required("<c>a<m>1234567<c>f<m>and more text", budget) is None
    assert required("<c>a<m>1234567<c>a<m>89abcdef", budget) == "<"


@pytest.mark.parametrize("text", ["😀", "é", "한", "ࠀ"])
def test_a_character_is_completed_before_the_end(text: str) -> None:
    """Fails with delimiters in the middle of a character, which a grammar of text has not."""
    byte_of = {TOKENIZER.token_bytes(token): token for token in range(256)}
    before, encoded = TOKENIZER.encode("abcd", False), text.encode()
    for cut in range(1, len(encoded)):
        output = [*before, *(byte_of[bytes([byte])] for byte in encoded[:cut])]
        allowed = ids(state(replace(OPEN, max_tokens=4)).required(array("q", output), 0)) or set()
        assert byte_of[encoded[cut : cut + 1]] in allowed
        for token in allowed:
            more = TOKENIZER.token_bytes(token)
            assert all(0x80 <= byte < 0xC0 for byte in more)
            # Valid, as far as it goes: `ࠀ` has a second byte that is not any of these.
            codecs.getincrementaldecoder("utf-8")().decode(encoded[:cut] + more)
    whole = [*before, *(byte_of[bytes([byte])] for byte in encoded)]
    assert ids(state(replace(OPEN, max_tokens=4)).required(array("q", whole), 0)) == {CLOSING[0]}


def test_a_character_that_no_token_completes_is_left_as_it_is() -> None:
    letters = {TOKENIZER.token_bytes(token): token for token in range(256)}
    for broken in (b"\xff", b"\x80", b"\xc0"):
        output = [*TOKENIZER.encode("abcde", False), letters[broken]]
        assert ids(state(OPEN).required(array("q", output), 0)) == {CLOSING[0]}


@pytest.mark.parametrize("has_grammar", [False, True])
def test_bits_do_not_depend_on_how_the_state_was_reached(has_grammar: bool) -> None:
    """Preemption, handover and recovery replay all tokens; a decoding sequence adds one after the other."""
    text = LLMatcher.grammar_from_regex("(<t>(.|\n)*</t>)?[a-e]*") if has_grammar else ""
    grammar = GrammarVocabulary(TOKENIZER, VOCAB).compile(text) if text else None
    draw = random.Random(8)
    for _ in range(60):
        output = TOKENIZER.encode("<t>" + "".join(draw.choice("abcd<t>/😀é") for _ in range(12)), False)
        one_by_one = state(grammar=grammar)
        tokens = array("q", [7])
        for index in range(40):
            bits = one_by_one.allowed(tokens, 1)
            again = state(grammar=grammar)
            # Some of the tokens at once, and then the rest.
            again.allowed(tokens[: 1 + draw.randrange(len(tokens))], 1)
            assert ids(again.allowed(tokens, 1)) == ids(bits) == ids(state(grammar=grammar).allowed(tokens, 1))
            allowed = ids(bits)
            assert allowed is None or allowed, "an output can always go on"
            wanted = output[index] if index < len(output) else draw.choice(CLOSING)
            tokens.append(wanted if allowed is None or wanted in allowed else draw.choice(sorted(allowed)))
            if END in tokens:
                break
        thought = TOKENIZER.decode(tokens[1:], False).split("</t>")[0].removeprefix("<t>")
        assert len(TOKENIZER.encode(thought, False)) <= BUDGET.max_tokens + 3


def test_with_a_grammar_thinking_is_what_it_starts_with() -> None:
    """A delimiter within a string of JSON is text."""
    vocabulary = GrammarVocabulary(TOKENIZER, VOCAB)
    grammar = vocabulary.compile(LLMatcher.grammar_from_regex("(<t>[a-z]*</t>)?[a-z<>]*"))

    def allowed(output: str) -> set[int] | None:
        return ids(state(grammar=grammar).allowed(array("q", TOKENIZER.encode(output, False)), 0))

    assert allowed("<t>abcde") == {CLOSING[0]}
    for free in ("a<t>abcdefgh", "<t>ab</t>x<t>abcdefgh", "<<t>abcdefgh"):
        found = allowed(free)
        assert found is not None
        assert len(found) > 5
    # Behind the one block none opens, also where what has closed it could be the start of another.
    budget = replace(BUDGET, opening="<c>a<m>", closings=("<c>",), max_tokens=9)
    free = vocabulary.compile(LLMatcher.grammar_from_regex("[a-z<>]*"))
    tokens = array("q", TOKENIZER.encode("<c>a<m>xy<c>a<m>abcdefghijklm", False))
    found = ids(state(budget, free).allowed(tokens, 0))
    assert found is not None
    assert len(found) > 5
    # Whatever else is listed, and although the output could not end here.
    bits = state(grammar=grammar).allowed(array("q", TOKENIZER.encode("<t>abcde", False)), 0, (), VOCABULARY.only([9]))
    assert ids(bits) == {CLOSING[0]}


def test_without_a_bound_that_is_reached_the_list_alone_holds() -> None:
    listed = VOCABULARY.only([5, 319])
    assert state().allowed(array("q", [7]), 0, (), listed) is listed
    assert state().allowed(array("q", [7]), 0) is None


def test_what_follows_is_known_early_only_far_from_the_bound() -> None:
    for output, can in (("<t>abc", True), ("<t>abcd", False), ("<t>abcde", False), ("<t></t>x", True)):
        assert state().can_run_ahead(array("q", TOKENIZER.encode(output, False)), 0) is can
    assert not state(replace(BUDGET, max_tokens=1)).can_run_ahead(array("q"), 0)
    grammar = GrammarVocabulary(TOKENIZER, VOCAB).compile(LLMatcher.grammar_from_regex("a*"))
    assert not state(grammar=grammar).can_run_ahead(array("q"), 0)
