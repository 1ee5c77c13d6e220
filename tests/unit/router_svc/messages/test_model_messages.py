"""How models write messages is found in their files, and named by the operator where that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.chat_template import ChatTemplate
from router_svc.message_formats import AUTO, NONE
from router_svc.messages.described_tools import with_described_tools
from router_svc.messages.model_messages import ModelMessages, messages_of


def _messages(directory: Path, template: str, name: str) -> ModelMessages:
    return messages_of(directory, ChatTemplate(template, {}), name)


_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("sign", "form", "thinks"),
    [
        ("<tool_call>", "hermes", False),
        ("<tool_call><think></think>", "hermes", True),
        ("<tool_call><function=", "qwen3_coder", False),
        ("<|python_tag|>", "llama3_json", False),
        ("[TOOL_CALLS]", "mistral_list", False),
        ("[TOOL_CALLS][ARGS]", "mistral", False),
        ("<｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", True),
        ("<｜tool▁calls▁begin｜><think>", "deepseek_v31", True),
        ("<|channel|>analysis<|message|>", "gpt_oss", True),
    ],
)
def test_the_form_follows_from_the_template(tmp_path: Path, sign: str, form: str, thinks: bool) -> None:
    found = _messages(tmp_path, _TOOLS + sign, AUTO)
    assert found.form is not None
    assert (found.form.name, found.thinks, found.has_tools_in_template) == (form, thinks, True)


def test_a_model_without_tools_in_its_template_gets_them_in_the_system_message(tmp_path: Path) -> None:
    found = _messages(tmp_path, "{{ messages }} without tools", AUTO)
    assert found.form is not None
    assert (found.form.name, found.thinks, found.has_tools_in_template) == ("hermes", False, False)


def test_a_model_that_thinks_and_knows_no_tools_keeps_its_form(tmp_path: Path) -> None:
    """Distilled R1 models: the template opens the thinking, and has another start of messages than hermes."""
    found = _messages(tmp_path, "{{ messages }}<｜tool▁calls▁begin｜>{{ '<｜Assistant｜><think>\\n' }}", AUTO)
    assert found.form is not None
    assert (found.form.name, found.thinks, found.has_tools_in_template) == ("deepseek_v31", True, False)


def test_what_follows_for_calls_is_read_from_the_template_that_shows_tools(tmp_path: Path) -> None:
    plain, single = "{{ messages }}", _TOOLS + "{{ raise_exception('only supports single tool-calls') }}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": single}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = messages_of(tmp_path, ChatTemplate.from_dir(tmp_path), AUTO)
    assert (found.has_tools_in_template, found.has_single_calls) == (True, True)
    assert not _messages(tmp_path, plain, AUTO).has_single_calls


def test_the_operator_may_name_the_form(tmp_path: Path) -> None:
    assert _messages(tmp_path, _TOOLS + "<tool_call>", NONE).form is None
    named = _messages(tmp_path, _TOOLS + "<tool_call>", "mistral")
    assert named.form is not None
    assert named.form.name == "mistral"
    with pytest.raises(SetupError, match="--message-format: 'other' is none of auto, none, hermes"):
        _messages(tmp_path, _TOOLS, "other")


_OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def test_a_response_template_of_the_model_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": _OWN}))
    found = _messages(tmp_path, _TOOLS + "<tool_call>", AUTO)
    assert found.form is not None
    assert (found.form.name, found.thinks, found.form.calls) == ("response_template", True, None)


@pytest.mark.parametrize("broken", [{}, {**_OWN, "start_anchor": None}, {**_OWN, "fields": {"audio": {}}}])
def test_one_that_cannot_be_read_is_left_out(tmp_path: Path, broken: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": broken}))
    found = _messages(tmp_path, _TOOLS + "<tool_call>", AUTO)
    assert found.form is not None
    assert found.form.name == "hermes"


def test_described_tools_are_text_of_the_three_usual_roles() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    system, user, assistant, result = with_described_tools(messages, [{"type": "function", "function": {"name": "f"}}])
    assert '{"type": "function", "function": {"name": "f"}}' in str(system["content"])
    assert user == messages[0]
    assert assistant == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    own = [{"role": "system", "content": "Be brief."}, *messages]
    assert str(with_described_tools(own, [{"x": 1}])[0]["content"]).startswith("Be brief.\n\n")
    assert with_described_tools(messages[:1], []) == messages[:1]
