"""Delimiters that are tokens of their own, as in the vocabularies of the families: grammar, tokens, text and parser."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken

from pdserve.model.grammar import GrammarFailed, GrammarVocabulary
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from router_svc.messages.events import Event, merged
from router_svc.messages.formats import FORMATS
from router_svc.messages.grammar import Calls, MessageRules, Thinking, message_grammar
from router_svc.messages.model_messages import kept_tokens
from router_svc.messages.parser import MessageParser
from tests.unit.model.vocabularies import byte_level
from tests.unit.router_svc.messages.recorded import MESSAGES
from tests.unit.router_svc.messages.recorded import TOOLS as TYPES
from tests.unit.router_svc.messages.test_grammar import TOOLS, TWO_CALLS

_QWEN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<think>", "</think>"),
)
#: Tokens of each family that are delimiters.
DELIMITERS = {
    "hermes": _QWEN,
    "qwen3_coder": _QWEN,
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "mistral_list": ("[TOOL_CALLS]",),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "gpt_oss": tuple(f"<|{name}|>" for name in ("channel", "message", "start", "end", "call", "return", "constrain")),
}
#: In some families they are special, in others they are not, and all but gpt-oss's could be either.
BOTH = [(form, is_special) for form in DELIMITERS for is_special in (True, False) if is_special or form != "gpt_oss"]


class Family:
    """The vocabulary of a family: bytes, some merges, and delimiters."""

    def __init__(self, form: str, *, is_special: bool) -> None:
        made = byte_level()
        tokens = [AddedToken(text, special=is_special, normalized=False) for text in DELIMITERS[form]]
        (made.add_special_tokens if is_special else made.add_tokens)(tokens)
        self.form = FORMATS[form]
        self.end = made.token_to_id("<|end|>") if form != "gpt_oss" else made.token_to_id("<|call|>")
        self.tokenizer = Tokenizer(made, (self.end,))
        self._vocabulary = GrammarVocabulary(self.tokenizer, made.get_vocab_size())

    def accepts(self, rules: MessageRules, tokens: Sequence[int]) -> bool:
        """Whether the message's grammar allows these tokens, and then the end."""
        grammar = self._vocabulary.compile(message_grammar(self.form, rules, self.tokenizer.special_tokens))
        try:
            bits = grammar.start().allowed(array("q", tokens), 0)
        except GrammarFailed:
            return False
        return bool(bits[self.end // 32] >> (self.end % 32) & 1)

    def read(self, *pieces: Sequence[int]) -> list[Event]:
        """What the tokens mean. The text of each piece comes at once."""
        detokenizer = StreamDetokenizer(self.tokenizer, kept_tokens=kept_tokens(self.form, self.tokenizer))
        parser = MessageParser(self.form.template, TYPES)
        events = [event for piece in pieces for event in parser.push(detokenizer.push(piece))]
        return merged([*events, *parser.push(detokenizer.finish()), *parser.finish()])


@pytest.mark.parametrize(("form", "is_special"), BOTH)
def test_the_tokens_of_a_message_mean_the_same_in_every_split_into_two(form: str, is_special: bool) -> None:
    family = Family(form, is_special=is_special)
    for name, text, meaning in MESSAGES:
        if name == form:
            tokens = family.tokenizer.encode(text, False)
            assert family.read(*([token] for token in tokens)) == meaning
            for cut in range(len(tokens) + 1):
                assert family.read(tokens[:cut], tokens[cut:]) == meaning


@pytest.mark.parametrize(("form", "is_special"), BOTH)
@pytest.mark.parametrize("calls", [Calls.AUTO, Calls.REQUIRED])
def test_the_grammar_has_the_tokens_that_the_family_writes(form: str, is_special: bool, calls: Calls) -> None:
    family = Family(form, is_special=is_special)
    rules = MessageRules(calls=calls, tools=TOOLS)
    tokens = family.tokenizer.encode(TWO_CALLS[form], False)
    assert set(tokens) & {family.tokenizer.encode(text, False)[0] for text in DELIMITERS[form]} or form == "llama3_json"
    assert family.accepts(rules, tokens)
    before = family.tokenizer.encode("Let me see.\n", False)
    has_opening = bool(family.form.text_opening)
    assert family.accepts(rules, [*before, *tokens]) is (calls is Calls.AUTO and not has_opening)
    assert not family.accepts(rules, family.tokenizer.encode(TWO_CALLS[form].replace("get_weather", "get_time"), False))


@pytest.mark.parametrize(("form", "is_special"), [each for each in BOTH if FORMATS[each[0]].thinking is not None])
def test_thinking_has_the_familys_tokens(form: str, is_special: bool) -> None:
    family = Family(form, is_special=is_special)
    rules = MessageRules(calls=Calls.AUTO, tools=TOOLS, thinking=Thinking.OPTIONAL)
    assert family.form.thinking is not None
    opening, closing = family.form.thinking
    tokens = family.tokenizer.encode(f"{opening}Hm.{closing}{TWO_CALLS[form]}", False)
    assert family.accepts(rules, tokens)
    assert not family.accepts(rules, tokens[: len(family.tokenizer.encode(f"{opening}Hm.", False))])
