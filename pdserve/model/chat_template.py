"""Renders a model's chat template in jinja2's immutable sandbox, within limits on time and size. No torch.

The operator chooses the model, and with it the template; clients supply only the messages. The limits turn a template
that runs forever, by itself or on hostile messages, into an error of one request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from time import monotonic

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pdserve.base.errors import RequestError, SetupError
from pdserve.model.end_of_text import special_token
from pdserve.model.fields import Fields, read_text

RENDER_TIMEOUT_S = 5.0
MAX_RENDERED_CHARS = 16_000_000
_MAX_TEMPLATE_CHARS = 1_000_000
_MAX_TEMPLATE_BYTES = 4 * _MAX_TEMPLATE_CHARS
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

#: Deadline of the rendering in this context, on the monotonic clock.
_deadline: ContextVar[float] = ContextVar("chat_template_deadline")


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
        environment = _Environment()
        try:
            self._template = environment.from_string(_Bounded().visit(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, ArithmeticError, MemoryError) as error:
            raise SetupError(f"{where} is not a valid chat template: {error}.") from error

    @classmethod
    def from_dir(cls, model_dir: Path) -> ChatTemplate:
        """Read `chat_template.jinja`, or else the template in `chat_template.json` or `tokenizer_config.json`."""
        config = Fields.read_optional(model_dir / "tokenizer_config.json")
        special = {name: token for name in _SPECIAL_TOKENS if (token := special_token(config, name)) is not None}
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
        token = _deadline.set(monotonic() + self._timeout_s)
        try:
            return _collect(self._template, variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise RequestError(f"The chat template rejects these messages: {error}", param="messages") from error
        except (ArithmeticError, RecursionError, MemoryError) as error:
            raise RequestError(f"The chat template failed: {type(error).__name__}", param="messages") from error
        finally:
            _deadline.reset(token)


class _LimitReached(jinja2.TemplateError):
    """Rendering takes too long, or its output is too large."""


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that transformers provides to templates, and no more. Every loop checks the deadline."""

    intercepted_binops = frozenset(("*", "**", "+"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def tick(self) -> str:
        """Raises when the deadline has passed."""
        if monotonic() > _deadline.get():
            raise _LimitReached("rendering takes too long")
        return ""

    def concat(self, *values: object) -> str:
        """The operator `~`, with a limit on the length of the result."""
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > MAX_RENDERED_CHARS:
            raise _LimitReached("a text is too long")
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        """Refuses arithmetic that could make a huge value from small ones, before it is computed."""
        self.tick()
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise _LimitReached("a power is too large")
        if operator == "*" and _length(left) * _times(right) + _length(right) * _times(left) > MAX_RENDERED_CHARS:
            raise _LimitReached("a repetition is too long")
        if operator == "+" and _length(left) + _length(right) > MAX_RENDERED_CHARS:
            raise _LimitReached("a text is too long")
        return super().call_binop(context, operator, left, right)


class _Bounded(NodeTransformer):
    """Adds a check of the deadline to each loop and macro (nothing else can repeat), and a limit to `~`.

    Both are attributes of the environment, which no variable of the template can shadow.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2 finds visitors by name
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        concat = nodes.EnvironmentAttribute("concat", lineno=node.lineno)
        return nodes.Call(concat, node.nodes, [], None, None, lineno=node.lineno)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
        call = nodes.Call(tick, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


class _Generation(Extension):
    """`{% generation %}`, with which some templates mark the model's own output. Renders its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _collect(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    texts, length = [], 0
    for text in template.generate(variables):
        length += len(text)
        if length > MAX_RENDERED_CHARS:
            raise _LimitReached(f"the prompt is longer than {MAX_RENDERED_CHARS} characters")
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


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As jinja2's own filter, but without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 0


def _times(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1000
