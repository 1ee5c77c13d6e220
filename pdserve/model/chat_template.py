"""Renders a model's chat template in jinja2's immutable sandbox, within limits on time and size. No torch.

The operator chooses the model, and with it the template; clients supply only the messages. The limits turn a template
that runs forever, by itself or on hostile messages, into an error of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from pdserve.base.errors import RequestError, SetupError
from pdserve.model import template_limits
from pdserve.model.end_of_text import special_token
from pdserve.model.fields import Fields, read_text
from pdserve.model.template_environment import compiled
from pdserve.model.template_limits import (
    METER,
    LimitReached,
    Meter,
)

RENDER_TIMEOUT_S = 5.0
_MAX_TEMPLATE_CHARS = 1_000_000
_MAX_TEMPLATE_BYTES = 4 * _MAX_TEMPLATE_CHARS
#: Variables that hold the model's special tokens.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


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
        self._special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        self._template: jinja2.Template | None = None
        if source is None:
            return
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise SetupError(
                f"{where} has {len(source)} characters (limit {_MAX_TEMPLATE_CHARS}). Use a shorter chat template."
            )
        token = METER.set(Meter.start(timeout_s))  # Constants are computed here.
        try:
            self._template = compiled(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, ArithmeticError, MemoryError) as error:
            raise SetupError(f"{where} is not a valid chat template: {error}.") from error
        finally:
            METER.reset(token)

    @classmethod
    def from_dir(cls, model_dir: Path) -> ChatTemplate:
        """Read `chat_template.jinja`, or else the template in `chat_template.json` or `tokenizer_config.json`."""
        config = Fields.read_optional(model_dir / "tokenizer_config.json")
        special = {name: token for name in SPECIAL_TOKENS if (token := special_token(config, name)) is not None}
        path = model_dir / "chat_template.jinja"
        if path.exists():
            return cls(read_text(path, _MAX_TEMPLATE_BYTES), special, str(path))
        separate = Fields.read_optional(model_dir / "chat_template.json")
        source = separate if separate.has("chat_template") else config
        return cls(_template_text(source), special, source.where)

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        """The prompt of a conversation; content may be a string or a list of text parts.

        `kwargs` (tools, documents, the request's chat_template_kwargs) are passed on. May take as long as the time
        limit, so call it in a thread. Raises `RequestError` when there is no template, when it rejects the messages,
        and when a limit is reached.
        """
        if self._template is None:
            raise RequestError("This model has no chat template. Use /v1/completions.", param="messages")
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": [_with_plain_content(message, index) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        token = METER.set(Meter.start(self._timeout_s))
        try:
            return _collect(self._template, variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise RequestError(f"The chat template rejects these messages: {error}", param="messages") from error
        except (ArithmeticError, RecursionError, MemoryError) as error:
            raise RequestError(f"The chat template failed: {type(error).__name__}", param="messages") from error
        finally:
            METER.reset(token)


def _collect(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    texts, length = [], 0
    for text in template.generate(variables):
        length += len(text)
        if length > template_limits.MAX_RENDERED_CHARS:
            raise LimitReached(f"the prompt is longer than {template_limits.MAX_RENDERED_CHARS} characters")
        texts.append(text)
    return "".join(texts)


def _with_plain_content(message: Mapping[str, object], index: int) -> dict[str, object]:
    """The message with its text parts joined by newlines, because most templates expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for item in content:
        text = item.get("text") if isinstance(item, Mapping) and item.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                "Only text content parts are supported: {'type': 'text', 'text': '...'}.",
                param=f"messages[{index}].content",
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _template_text(source: Fields) -> str | None:
    """The template, or of several the one named "default"."""
    value = source.raw("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = entries[-1].get("template") if entries else None
    return value if isinstance(value, str) else None
