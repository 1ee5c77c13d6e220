"""Chat templates: what they are given, and that a hostile one harms nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pdserve.base.errors import RequestError, SetupError
from pdserve.model import chat_template
from pdserve.model.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, timeout_s=0.2).render(messages or HELLO, **kwargs)


def test_messages_special_tokens_and_flags_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ extra }}"
    )
    assert render(source, extra="!") == "<s>[user] Hello\n[assistant]!"
    assert render(source, add_generation_prompt=False) == "<s>[user] Hello\n"


def test_callers_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(HELLO, bos_token="") == "Hello"
    with pytest.raises(TypeError):
        template.render(HELLO, **{"messages": []})  # type: ignore[arg-type]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": "x"}, {"type": "text"}, "text", 3])
def test_other_parts_are_refused_with_their_place(part: object) -> None:
    messages: list[dict[str, object]] = [*HELLO, {"role": "user", "content": [part]}]
    with pytest.raises(RequestError) as refused:
        render("{{ messages[1].content }}", messages)
    assert refused.value.param == "messages[1].content"


def test_messages_without_content_pass() -> None:
    call: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert render("{{ messages[0].tool_calls[0].id }}", [call]) == "1"


def test_what_templates_expect_of_transformers_is_there() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ 'a' ~ 1 ~ none }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ [1] + [2] }}") == "a1Noneabab8[1, 2]"
    assert render("{% if tools %}x{% endif %}a\n    {% if true %}b{% endif %}") == "a\nb"


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{{ 'x' + 1 }}",
        "{{ messages[5].content.x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'ab' * 900000000 }}",
        "{{ [0] * 900000000 }}",
        "{{ range(10 ** 8) | list }}",
    ],
)
def test_what_a_template_must_not_do_is_an_error_of_the_request(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError):
        render(source)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{% set tick = 1 %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(9) recursive %}{{ loop(range(9)) }}{{ loop(range(9)) }}{% endfor %}",
    ],
)
def test_a_template_that_runs_on_is_stopped(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError):
        render(source)
    assert time.monotonic() - start < 5


def test_a_template_that_doubles_its_text_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100_000)
    for double in ("x ~ x", "x + x", "x * 2"):
        source = "{% set x = 'ab' %}" + f"{{% set x = {double} %}}" * 40 + "{{ x }}"
        with pytest.raises(RequestError, match="too long"):
            render(source)


def test_a_prompt_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RequestError, match="longer than 1000"):
        render("{% for i in range(300) %}{{ 'abcd' }}{% endfor %}")


def test_renderings_at_once_have_their_own_deadlines() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, timeout_s=30)
    hostile = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", {}, timeout_s=0.05
    )
    with pytest.raises(RequestError):
        hostile.render(HELLO)
    assert template.render(HELLO) == "Hello"


def test_a_template_that_does_not_parse_stops_the_start() -> None:
    with pytest.raises(SetupError, match="cannot be used"):
        ChatTemplate("{% for %}", {})


def test_a_model_without_a_template_says_what_to_use() -> None:
    template = ChatTemplate(None, {})
    assert not template.exists
    with pytest.raises(RequestError, match="/v1/completions"):
        template.render(HELLO)


@pytest.mark.parametrize("place", ["jinja", "json", "config", "named", "none"])
def test_a_template_is_found_wherever_a_checkpoint_keeps_it(tmp_path: Path, place: str) -> None:
    config: dict[str, object] = {"bos_token": {"content": "<s>"}}
    source = "{{ bos_token }}hi"
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
        config["chat_template"] = "not this one"
    if place == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    if place == "config":
        config["chat_template"] = source
    if place == "named":
        config["chat_template"] = [{"name": "rag", "template": ""}, {"name": "default", "template": source}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_dir(tmp_path)
    assert template.exists == (place != "none")
    if template.exists:
        assert template.render(HELLO) == "<s>hi"
