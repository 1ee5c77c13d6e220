"""Renders a chat template in jinja2's immutable sandbox, within limits on time and size. No torch.

The operator chooses the model, and with it the template; clients supply only the messages, unless the operator trusts
them with templates, too. The limits turn a template that runs forever, by itself or on hostile messages, into an error
of one request.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pdserve.base.errors import RequestError, SetupError
from pdserve.model import template_limits
from pdserve.model.fields import Fields, read_text
from pdserve.model.template_environment import compiled
from pdserve.model.template_limits import (
    METER,
    LimitReached,
    Meter,
)
from pdserve.model.tokenizer_settings import TokenizerSettings

RENDER_TIMEOUT_S = 5.0
_MAX_TEMPLATE_CHARS = 1_000_000
_MAX_TEMPLATE_BYTES = 4 * _MAX_TEMPLATE_CHARS
#: The field with a client's template, for errors.
_OWN = "chat_template"
#: A text by which a template is tried, and what is around it where its list is printed.
_PROBE = "probe-of-the-content"
_LISTED = re.compile(rf"['\"]text['\"]: ?['\"]{_PROBE}")
_NO_VARIABLES: Mapping[str, object] = {"tools": None, "documents": None}
_SYSTEM_ROLES = ("system", "developer")
#: What a template raises on messages that it was not written for, and what no message explains.
_REJECTIONS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
_FAILURES = (ArithmeticError, RecursionError, MemoryError)


class ChatTemplate:
    """One model's template; rendering is safe from several threads."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        where: str = "chat template",
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        """`source` None: the model has no template. Raises `SetupError` when the template is invalid."""
        #: The template's text; empty: there is none.
        self.source = source or ""
        self.special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        self._is_clients = False
        self._template: jinja2.Template | None = None
        #: Whether the prompt has the text of a message whose content is one text, and of one whose content is a list.
        self._shows_text, self._shows_lists = True, False
        #: The variables that the template reads.
        self.variables: frozenset[str] = frozenset()
        #: The template of conversations with tools, where the model has one of its own; None: this one.
        self.for_tools: ChatTemplate | None = None
        if source is None:
            return
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise SetupError(
                f"{where} has {len(source)} characters (limit {_MAX_TEMPLATE_CHARS}). Use a shorter chat template."
            )
        token = METER.set(Meter.start(timeout_s))  # Constants are computed here.
        try:
            self._template, self.variables, reads_text = compiled(source)
            self._shows_lists = reads_text and self._shows([_content_part(_PROBE)])
            self._shows_text = not self._shows_lists or self._shows(_PROBE)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, ArithmeticError, MemoryError) as error:
            raise SetupError(f"{where} is not a valid chat template: {error}.") from error
        finally:
            METER.reset(token)

    @classmethod
    def from_dir(cls, model_dir: Path) -> ChatTemplate:
        """Read `chat_template.jinja`, or else the template in `chat_template.json` or `tokenizer_config.json`."""
        config = Fields.read_optional(model_dir / "tokenizer_config.json")
        special = TokenizerSettings.from_dir(model_dir).special_tokens
        path = model_dir / "chat_template.jinja"
        of_tools = model_dir / "additional_chat_templates" / "tool_use.jinja"
        if path.exists():
            template = cls(read_text(path, _MAX_TEMPLATE_BYTES), special, str(path))
            if of_tools.exists():
                template.for_tools = cls(read_text(of_tools, _MAX_TEMPLATE_BYTES), special, str(of_tools))
            return template
        separate = Fields.read_optional(model_dir / "chat_template.json")
        source = separate if separate.has("chat_template") else config
        template = cls(_template_text(source), special, source.where)
        if (text := _template_text(source, "tool_use")) is not None:
            template.for_tools = cls(text, special, source.where)
        return template

    @classmethod
    def of_client(cls, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """A client's template. Raises `RequestError` with the line of what is wrong with it. Call it in a thread."""
        try:
            template = cls(source, special_tokens)
        except SetupError as error:
            cause = error.__cause__ or error
            text = cause.message if isinstance(cause, jinja2.TemplateError) else type(cause).__name__
            raise RequestError(f"`{_OWN}` is not a valid template{_line_of(cause)}: {text}", param=_OWN) from error
        template._is_clients = True
        return template

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        """The prompt of a conversation; content may be a string or a list of text parts.

        It gets to the template as it is, if that shows such content. Else parts are joined by newlines, or a text
        becomes one part.

        `kwargs` (tools, documents, the request's chat_template_kwargs) are passed on. May take as long as the time
        limit, so call it in a thread. Raises `RequestError` when there is no template, when it rejects the messages,
        and when a limit is reached.
        """
        if self._template is None:
            raise RequestError("This model has no chat template. Use /v1/completions.", param="messages")
        variables = {
            **_NO_VARIABLES,
            **self.special_tokens,
            **kwargs,
            "messages": [self._shaped(message, index) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        token = METER.set(Meter.start(self._timeout_s))
        try:
            return _collect(self._template, variables)
        except _REJECTIONS as error:
            if self._is_clients:
                raise RequestError(f"`{_OWN}` failed{_line_of(error)}: {error}", param=_OWN) from error
            if self._refuses_roles(variables):
                raise RequestError(
                    f"The chat template refuses the system message: {error}. Put its text into a message of the user.",
                    param="messages",
                ) from error
            raise RequestError(f"The chat template rejects these messages: {error}", param="messages") from error
        except _FAILURES as error:
            name = type(error).__name__
            if self._is_clients:
                raise RequestError(f"`{_OWN}` failed{_line_of(error)}: {name}", param=_OWN) from error
            raise RequestError(f"The chat template failed: {name}", param="messages") from error
        finally:
            METER.reset(token)

    def _shows(self, content: object) -> bool:
        """Whether the prompt of a message with this content has its text. Within what is left of the limits."""
        assert self._template is not None
        user = {"role": "user", "content": content}
        nothing = {**_NO_VARIABLES, "add_generation_prompt": True, **self.special_tokens}
        # Some templates refuse a conversation that does not start with a system message.
        for messages in ([user], [{**user, "role": "system"}, user]):
            try:
                text = _collect(self._template, {**nothing, "messages": messages})
            except (*_REJECTIONS, *_FAILURES, RequestError):
                continue
            # A list that is printed as a whole was not meant to be one.
            if _PROBE in text and not _LISTED.search(text):
                return True
        return False

    def _shaped(self, message: Mapping[str, object], index: int) -> dict[str, object]:
        """The message with its content in a form that the template shows: as it is, or else one text or a list."""
        content = message.get("content")
        if not isinstance(content, list):
            is_shown = self._shows_text or content is None
            return {**message} if is_shown else {**message, "content": [_content_part(content)] if content else []}
        texts = _texts_of(content, index)
        return {**message} if self._shows_lists else {**message, "content": "\n".join(texts)}

    def _refuses_roles(self, variables: Mapping[str, Any]) -> bool:
        """Whether it takes the messages without those of the system. Within what is left of the limits."""
        messages = variables["messages"]
        others = [message for message in messages if message.get("role") not in _SYSTEM_ROLES]
        if not others or len(others) == len(messages):
            return False
        assert self._template is not None
        try:
            _collect(self._template, {**variables, "messages": others})
        except (*_REJECTIONS, *_FAILURES, RequestError):
            return False
        return True


def _line_of(error: BaseException) -> str:
    """Where in a template an error is, as a part of a sentence; empty: unknown."""
    line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
    if line is None:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [number for frame, number in frames if frame.f_code.co_filename == "<template>"]
        line = lines[-1] if lines else None
    return "" if line is None else f" in line {line}"


def _collect(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    texts, length = [], 0
    for text in template.generate(variables):
        length += len(text)
        if length > template_limits.MAX_RENDERED_CHARS:
            raise LimitReached(f"the prompt is longer than {template_limits.MAX_RENDERED_CHARS} characters")
        texts.append(text)
    return "".join(texts)


def _content_part(text: object) -> dict[str, object]:
    return {"type": "text", "text": text}


def _texts_of(content_parts: Sequence[object], index: int) -> list[str]:
    """The texts of a message's parts. Raises `RequestError` for other parts."""
    texts = []
    for item in content_parts:
        text = item.get("text") if isinstance(item, Mapping) and item.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                "Only text content parts are supported: {'type': 'text', 'text': '...'}.",
                param=f"messages[{index}].content",
            )
        texts.append(text)
    return texts


def _template_text(source: Fields, name: str = "default") -> str | None:
    """The only template, which is the default, or of several the one of this name. Raises `SetupError`."""
    value = source.raw("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if "default" not in named:
            raise SetupError(f"{source.where}: chat_template has {len(value)} templates, but none is named 'default'.")
        value = named.get(name)
    elif name != "default":
        return None
    return value if isinstance(value, str) else None
