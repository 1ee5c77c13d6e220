"""The forms of content: each template gets that of the two which it shows."""

from __future__ import annotations

import pytest

from pdserve.base.errors import RequestError
from pdserve.model.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, object]]) -> str:
    return ChatTemplate(source, {}).render(messages)


def test_text_content_is_joined_by_newlines() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "one\ntwo"


#: Templates as vision models have them, which go through the parts of every message, and one that takes both forms.
GOES_THROUGH = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }};{% endif %}"
    "{% endfor %}{% endfor %}"
)
FIRST_OF_CONTENT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'][0]['text'] }};{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }};"
    "{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
)
FILTERED = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(';') }};{% endfor %}"
)
BY_METHOD = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.get('text', '') }};{% endfor %}{% endfor %}"
)
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + GOES_THROUGH
TEXT_ALONE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}{{ 'text' if false }}"


@pytest.mark.parametrize(
    ("source", "of_several"),
    [
        (GOES_THROUGH, "one;two;"),
        (FIRST_OF_CONTENT, "one;"),
        (BOTH, "one;two;"),
        (FILTERED, "one;two;"),
        (BY_METHOD, "one;two;"),
        (SYSTEM_FIRST, "one;two;"),
        (TEXT_ALONE, "one\ntwo;"),
    ],
    ids=["each", "first", "both", "filtered", "by method", "system first", "text alone"],
)
def test_each_form_of_content_reaches_a_template_that_shows_either(source: str, of_several: str) -> None:
    """Without the right form, such a template prints nothing of a text, and fails or prints a list of the other."""
    system: dict[str, object] = {"role": "system", "content": "s"}
    several = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(source, [system, *HELLO]) == "[system]s;[user]Hello;"
    assert render(source, [system, {"role": "user", "content": several}]) == f"[system]s;[user]{of_several}"


def test_a_message_without_text_stays_empty_in_a_template_that_goes_through_content() -> None:
    """A list of an empty text would be true where the template asks whether there is content."""
    texts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    source = "{% for m in messages %}{% if m.content %}<" + texts + ">{% endif %}{% endfor %}"
    call: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert render(source, [*HELLO, call, {"role": "assistant", "content": None}]) == "<Hello>"


@pytest.mark.parametrize("item", [{"type": "image_url", "image_url": "x"}, {"type": "text"}, "text", 3])
def test_other_content_is_refused_with_the_index_of_its_message(item: object) -> None:
    messages: list[dict[str, object]] = [*HELLO, {"role": "user", "content": [item]}]
    with pytest.raises(RequestError) as refused:
        render("{{ messages[1].content }}", messages)
    assert refused.value.param == "messages[1].content"


def test_messages_need_no_content() -> None:
    call: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert render("{{ messages[0].tool_calls[0].id }}", [call]) == "1"
