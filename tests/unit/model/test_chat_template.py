"""Chat templates: their variables, and the limits that confine a hostile template to one request."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import pytest

from pdserve.base.errors import RequestError, SetupError
from pdserve.model import template_limits
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


def test_conversations_with_tools_have_the_template_that_is_named_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_dir(tmp_path)
    assert (template.source, template.for_tools and template.for_tools.source) == ("plain", "with {{ tools }}")
    (tmp_path / "chat_template.jinja").write_text("own")
    assert ChatTemplate.from_dir(tmp_path).for_tools is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("own with {{ tools }}")
    template = ChatTemplate.from_dir(tmp_path)
    assert (template.source, template.for_tools and template.for_tools.source) == ("own", "own with {{ tools }}")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(SetupError, match="none is named 'default'"):
        ChatTemplate.from_dir(tmp_path)


def test_templates_have_the_extensions_of_transformers() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ 'a' ~ 1 ~ none }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ [1] + [2] }}") == "a1Noneabab8[1, 2]"
    assert render("{% if tools %}x{% endif %}a\n    {% if true %}b{% endif %}") == "a\nb"


def test_a_template_may_reject_messages() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


_NO_SYSTEM = (
    "{% for each in messages %}{% if each.role == 'system' or each.content == 'bad' %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ each.content }}{% endfor %}"
)


def test_a_template_that_refuses_the_system_alone_says_so() -> None:
    system: dict[str, object] = {"role": "system", "content": "Be brief."}
    user: dict[str, object] = {"role": "user", "content": "Hi"}
    refuses_system = r"refuses the system message: Roles must alternate\. Put its text into a message of the user"
    for messages, text in (
        ([system, user], refuses_system),
        # Something else is wrong, too, or is all that is wrong.
        ([system, user, {"role": "user", "content": "bad"}], "rejects these messages: Roles must alternate"),
        ([{"role": "user", "content": "bad"}], "rejects these messages: Roles must alternate"),
        ([system], "rejects these messages: Roles must alternate"),
    ):
        with pytest.raises(RequestError, match=text) as refused:
            render(_NO_SYSTEM, messages)
        assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a\n{% if %}", "is not a valid template in line 2: Expected an expression"),
        ("a\n\n{{ 1 | nothing }}", "is not a valid template in line 3: No filter named 'nothing'"),
        ("{{ " + "-" * 6000 + "1 }}", "is not a valid template: RecursionError"),
        ("{{ x", "is not a valid template in line 1: unexpected end of template"),
        ("x" * 1_000_001, "is not a valid template"),
        ("a\n{{ messages.x.y }}", "failed in line 2: 'list object' has no attribute 'x'"),
        ("{% macro f() %}\n{{ 1 // 0 }}{% endmacro %}\n\n{{ f() }}", "failed in line 2: ZeroDivisionError"),
        ("\n{{ raise_exception('no') }}", "failed in line 2: no"),
        ("{% include '/etc/passwd' %}", "failed in line 1: no loader"),
        ("\n{{ ''.__class__.__mro__ }}", "failed in line 2: access to attribute '__class__'"),
        ("{% for a in range(9 ** 9) %}{% for b in range(9 ** 9) %}{% endfor %}{% endfor %}", "failed in line 1"),
    ],
)
def test_what_is_wrong_with_a_clients_template_is_named_with_its_line(source: str, text: str) -> None:
    with pytest.raises(RequestError, match=re.escape(text)) as refused:
        ChatTemplate.of_client(source, {}).render(HELLO)
    assert refused.value.param == "chat_template"
    assert "chat_template" in str(refused.value)


def test_a_clients_template_has_the_tokens_of_the_model() -> None:
    assert (
        ChatTemplate.of_client("{{ bos_token }}{{ messages[0].role }}", {"bos_token": "<s>"}).render(HELLO) == "<s>user"
    )


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
def test_a_forbidden_operation_is_an_error_of_the_request_before_it_takes_memory(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            render(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20


#: Ways from a template to Python's objects that were open in jinja2, or in servers that used it without the sandbox.
ESCAPES = [
    "{% for c in ''.__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('touch MARKER').read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch MARKER') }}",
    "{{ namespace.__init__.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ ('' | attr('format'))('{0.__class__}') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{{ ['{0.__class__}'] | map('format', messages) | list }}",
    "{% set f = ''.format %}{{ f('{0.__class__}', messages) }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [messages] | groupby('__class__') | list }}",
    "{{ [''] | sum(attribute='__class__', start='') }}",
    "{% for m in messages recursive %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_of_python_or_its_files(source: str, tmp_path: Path) -> None:
    """CVE-2026-5760, CVE-2024-34359: templates of GGUF files ran code. Fails with `jinja2.Environment` as base."""
    marker = tmp_path / "marker"
    try:
        text = render(source.replace("MARKER", str(marker)))
    except (RequestError, SetupError):
        text = ""
    assert not marker.exists()
    assert not any(word in text for word in ("class", "function", "module", "root:", "0x")), text


#: A growing operation each, which would take from 100 MB up to more than any machine has.
HOSTILE = {
    "% with a width": "{{ '%300000000d' % 1 }}",
    "% with a computed width": "{{ '%*d' % (300000000, 1) }}",
    "% with a precision": "{{ '%.300000000f' % 1.5 }}",
    "% of long texts": "{{ '%s%s' % ('a' * 9000000, 'a' * 9000000) }}",
    "format": "{{ '{:>300000000}'.format(1) }}",
    "format with a nested width": "{{ '{:>{w}}'.format(1, w=300000000) }}",
    "format_map": "{{ '{x:>300000000}'.format_map({'x': 1}) }}",
    "format repeats": "{{ ('{0}' * 100).format('a' * 9000000) }}",
    "filter format": "{{ '%300000000d' | format(1) }}",
    "ljust": "{{ 'a'.ljust(300000000) }}",
    "rjust": "{{ 'a'.rjust(300000000) }}",
    "center": "{{ 'a'.center(300000000) }}",
    "zfill": "{{ 'a'.zfill(300000000) }}",
    "filter center": "{{ 'a' | center(300000000) }}",
    "filter center by map": "{{ ['a'] | map('center', 300000000) | list }}",
    "filter indent": "{{ 'a' | indent(300000000, true) }}",
    "filter indent of many lines": "{{ ('\n' * 100000) | indent(9999) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(9999) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
    "replace nothing": "{{ ('a' * 1000000).replace('', 'b' * 1000) }}",
    "filter replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000) }}",
    "join": "{{ ('b' * 900000).join('a' * 1000) }}",
    "filter join": "{{ range(1000) | join('a' * 900000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 10000}) }}",
    "split": "{{ ('a ' * 8000000).split() }}",
    "filter wordwrap": "{{ ('a' * 100000) | wordwrap(1, true, 'b' * 10000) }}",
    "filter batch": "{{ 'a' | batch(300000000, 'x') | list }}",
    "filter slice": "{{ 'abc' | slice(300000000) | list }}",
    "filter round": "{{ 5 | round(-300000000) }}",
    "filter sum": "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
    "filter tojson": "{{ [1] | tojson(indent=300000000) }}",
    "strftime_now": "{{ strftime_now('%Y' * 2000000) }}",
    "strftime_now with a width": "{{ strftime_now('%999Y' * 40000) }}",
    "bytes of a number": "{{ (1).to_bytes(300000000, 'big') }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "slices": "{% set x = 'a' * 15000000 %}" + "".join(f"{{% set a{i} = x[{i}:] %}}" for i in range(100)),
    "squares": "{% set x = 10 ** 100 %}" + "{% set x = x * x %}" * 60,
    "lists of lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "hashes of tuples": "{% set x = 1 %}" + "{% set x = (x, x) %}" * 60 + "{{ {x: 1} }}",
    "attributes of a namespace": "{% set n = namespace(x=1) %}" + "{% set n.x = {1: n.x, 2: n.x} %}" * 60 + "{{ n }}",
    "dicts": "{% set x = 1 %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x }}",
    "text of a loop": "{% set x %}{% for i in range(99999) %}" + "a" * 100000 + "{% endfor %}{% endset %}{{ x }}",
}


@pytest.mark.parametrize("operation", HOSTILE)
def test_an_operation_that_grows_its_result_is_refused_before_it_takes_memory(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 17. The width of a date fails without the limit on the format of `_strftime_now`."""
    if operation in ("lists of lists", "hashes of tuples", "attributes of a namespace", "dicts"):
        monkeypatch.setattr(template_limits, "MAX_RENDERED_CHARS", 100_000)  # Reached sooner.
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"longer|more than|too large|above|undefined"):
            ChatTemplate(HOSTILE[operation], {}).render(HELLO)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20


def test_ordinary_uses_of_the_limited_operations_give_what_jinja2_gives() -> None:
    for source, text in {
        "{{ '%s-%3d' % ('a', 4) }}": "a-  4",
        "{{ '{:>4}'.format(1) }}{{ '%s' | format(3) }}": "   13",
        "{{ 'a'.ljust(3) }}{{ 'a' | center(3) }}{{ 7 % 3 }}": "a   a 1",
        "{{ 'a,b' | replace(',', ';') }}{{ 'aXa'.replace('X', '') }}": "a;baa",
        "{{ messages | map(attribute='role') | join(',') }}{{ '-'.join(['a', 'b']) }}": "usera-b",
        "{{ 'x\ny' | indent(2) }}{{ ' a ' | trim }}{{ 'a b'.split()[-1] }}": "x\n  yab",
        "{{ {'a': [1]} | tojson(indent=2) }}": '{\n  "a": [\n    1\n  ]\n}',
        "{% set n = namespace(x=[]) %}{% set n.x = n.x + [1] %}{{ n.x }}{{ messages[0].content[1:] }}": "[1]ello",
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ [2, 1] | sort }}": "a=1[1, 2]",
    }.items():
        assert render(source) == text


class SteppingClock:
    """A clock that is 10 ms later at each reading."""

    def __init__(self) -> None:
        self.num_readings = 0

    def __call__(self) -> float:
        self.num_readings += 1
        return self.num_readings * 0.01


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{% set tick = 1 %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(9) recursive %}{{ loop(range(9)) }}{{ loop(range(9)) }}{% endfor %}",
    ],
)
def test_an_endless_template_ends_at_the_first_check_after_its_deadline(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding 17. Fails without `Meter.tick` in `Environment.tick`."""
    clock = SteppingClock()
    monkeypatch.setattr(template_limits, "monotonic", clock)
    with pytest.raises(RequestError, match="takes too long"):
        ChatTemplate(source, {}, timeout_s=0.205).render(HELLO)
    # One reading is for compiling. The second one sets the deadline; 21 steps later it has passed.
    assert clock.num_readings == 23


def test_a_template_that_doubles_its_text_reaches_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_RENDERED_CHARS", 100_000)
    for double in ("x ~ x", "x + x", "x * 2"):
        source = "{% set x = 'ab' %}" + f"{{% set x = {double} %}}" * 40 + "{{ x }}"
        with pytest.raises(RequestError, match="a text is longer"):
            render(source)


def test_many_texts_below_the_limit_of_one_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_MAX_TOTAL_CHARS", 100_000)
    with pytest.raises(RequestError, match="all texts together are longer than 100000"):
        render("{% for i in range(300) %}{% set x = 'a' * 1000 %}{% endfor %}")


def test_a_prompt_longer_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RequestError, match="longer than 1000"):
        render("{% for i in range(300) %}{{ 'abcd' }}{% endfor %}")


def test_each_rendering_has_its_own_deadline() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, timeout_s=30)
    hostile = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", {}, timeout_s=0.05
    )
    with pytest.raises(RequestError):
        hostile.render(HELLO)
    assert template.render(HELLO) == "Hello"


def test_an_invalid_template_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="is not a valid chat template"):
        ChatTemplate("{% for %}", {})


def test_without_a_template_the_error_names_the_endpoint_to_use() -> None:
    template = ChatTemplate(None, {})
    assert not template.exists
    with pytest.raises(RequestError, match="/v1/completions"):
        template.render(HELLO)


@pytest.mark.parametrize("location", ["jinja", "json", "config", "named", "none"])
def test_a_template_is_found_in_every_location_that_checkpoints_use(tmp_path: Path, location: str) -> None:
    config: dict[str, object] = {"bos_token": {"content": "<s>"}}
    source = "{{ bos_token }}hi"
    if location == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
        config["chat_template"] = "not this one"
    if location == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    if location == "config":
        config["chat_template"] = source
    if location == "named":
        config["chat_template"] = [{"name": "rag", "template": ""}, {"name": "default", "template": source}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_dir(tmp_path)
    assert template.exists == (location != "none")
    if template.exists:
        assert template.render(HELLO) == "<s>hi"
