"""Messages of all families mean the same however their text is split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_svc.message_formats import FORMAT_NAMES
from router_svc.messages.events import CallArguments, Event, Text, merged
from router_svc.messages.formats import FORMATS
from router_svc.messages.parser import MessageParser
from tests.unit.router_svc.messages.recorded import MESSAGES, TOOLS


def _read(form: str, pieces: list[str], prefix: str = "") -> list[Event]:
    parser = MessageParser(FORMATS[form].template, TOOLS, prefix=prefix)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


@pytest.mark.parametrize(("form", "text", "meaning"), MESSAGES)
def test_what_a_message_means(form: str, text: str, meaning: list[Event]) -> None:
    assert _read(form, [text]) == meaning


@pytest.mark.parametrize(("form", "text", "meaning"), MESSAGES)
def test_character_by_character_it_means_the_same(form: str, text: str, meaning: list[Event]) -> None:
    assert _read(form, list(text)) == meaning


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_split_means_the_same(data: st.DataObject) -> None:
    form, text, meaning = data.draw(st.sampled_from(MESSAGES))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _read(form, pieces) == meaning


#: What delimiters are made of, and text around them.
_FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "put", ', '"arguments": ', "{}", "}", "\n"),
        *(" a ", "<function=put>", "</function>", "<parameter=value>\n", "\n</parameter>", "[TOOL_CALLS]", "[", "]"),
        *("put[ARGS]", "<｜tool▁call▁begin｜>", "put<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|channel|>", "analysis"),
        *("<|message|>", "<|end|>", "; ", '{"name"', '"', "\\", "<", "</", "commentary to=functions.put", "final"),
        "<|start|>assistant",
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(FORMAT_NAMES), st.lists(_FRAGMENTS, max_size=12))
def test_no_text_breaks_the_parser_and_splits_do_not_matter(form: str, fragments: list[str]) -> None:
    whole = _read(form, ["".join(fragments)])
    assert _read(form, fragments) == whole
    assert _read(form, list("".join(fragments))) == whole


def test_the_prompt_may_have_opened_the_thinking() -> None:
    meaning = [Text("Hm.", is_thinking=True), Text("Hello.")]
    assert _read("hermes", ["Hm.\n</think>\n\nHello."], prefix="<think>\n") == meaning
    assert _read("hermes", ["Hello."], prefix="<think>\n\n</think>\n\n") == [Text("Hello.")]


def test_a_prompt_that_ends_within_a_call_or_a_delimiter_leaves_nothing_behind() -> None:
    """A tool's result can look like a call, and its rest was the message's."""
    assert _read("mistral", ["All fine."], prefix='[TOOL_CALLS]put[ARGS]{"a') == [Text("All fine.")]
    assert _read("hermes", ["b"], prefix="a <") == [Text("b")]


def test_calls_of_other_functions_and_names_that_are_none_are_text() -> None:
    for form, text in (
        ("qwen3_coder", "Use <function=nosuch> here"),
        ("mistral", "[TOOL_CALLS]nosuch[ARGS]{}"),
        ("llama3_json", '{"name": ' + "[" * 5000),
        ("hermes", '<tool_call>{"na'),
    ):
        assert _read(form, [text]) == _read(form, list(text)) == [Text(text)]


@pytest.mark.parametrize("form", FORMAT_NAMES)
def test_white_space_without_end_is_held_back_only_as_far_as_delimiters_may_have_it(form: str) -> None:
    """Patterns with unbounded white space hold all of it, and search it again with each token."""
    parser = MessageParser(FORMATS[form].template, TOOLS)
    for _ in range(100):
        parser.push(" " * 10)
        assert len(parser._buffer) - parser._position <= 64


def test_arguments_are_passed_on_as_they_come() -> None:
    """Others keep them until the call is complete: vllm#30439."""
    for form, text, _ in MESSAGES:
        if "city" not in text:
            continue
        parser = MessageParser(FORMATS[form].template, TOOLS)
        position = text.index("Par" if "Par" in text else "São")
        events = merged([event for each in text[: position + 3] for event in parser.push(each)])
        arguments = [event.text for event in events if isinstance(event, CallArguments)]
        assert arguments[-1][-3:] in ("Par", "São"), form


def test_every_form_has_a_name_for_the_flag() -> None:
    assert tuple(FORMATS) == FORMAT_NAMES
