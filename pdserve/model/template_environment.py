"""The jinja2 environment of chat templates: that of transformers, with limits on every operation. No torch.

Attributes are the sandbox's concern. Here, operations, methods, filters, literals and loops are counted before they
make something (`pdserve.model.template_limits`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pdserve.model.template_limits import (
    METER,
    LimitReached,
    checked,
    counted,
    reserve_method,
    reserve_operator,
    result_size,
    size_of,
)

#: Texts below this length are not counted by filters without arguments, which cannot make much of them.
_SHORT = 1024


class Environment(ImmutableSandboxedEnvironment):
    """The environment that transformers provides to templates, within limits: every operation that can grow counts."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=counted)
        self.filters["tojson"] = _tojson
        self.filters = {name: _limited(name, function) for name, function in self.filters.items() if name != "pprint"}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.checked, self.counted = checked, counted

    def tick(self, num_chars: int) -> str:
        """Counts the template's own text in a loop. Raises when the deadline has passed."""
        meter = METER.get()
        meter.tick()
        meter.reserve(num_chars)
        return ""

    def concat(self, *values: object) -> str:
        """The operator `~`, with a limit on the length of the result."""
        METER.get().reserve(sum(map(size_of, values)))
        return "".join(map(str, values))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        """Refuses what could make a huge value from small ones, before it is computed."""
        reserve_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        """As above, for methods and functions."""
        if getattr(__obj, "__name__", "") == "join":
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
        reserve_method(__obj, [*args, *kwargs.values()])
        return checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As above, for `str.format`, which jinja2 replaces with a function of its own."""
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        def limited(*args: object, **kwargs: object) -> str:
            reserve_method(value, [*args, *kwargs.values()])
            return wrapper(*args, **kwargs)

        return limited


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, whose result is counted before it is made."""
    first = int(hasattr(function, "jinja_pass_arg"))
    kind = f"{name} filter" if name in ("join", "format") else name

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        if len(args) == first + 1 and not kwargs and type(args[first]) is str and len(args[first]) < _SHORT:
            return function(*args)
        if len(args) > first and isinstance(args[first], Iterator) and name in ("join", "sum", "sort", "list"):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        value = args[first] if len(args) > first else ""
        METER.get().reserve(result_size(kind, value, [*args[first + 1 :], *kwargs.values()]))
        return checked(function(*args, **kwargs))

    return limited


class _Bounded(NodeTransformer):
    """Adds a check of the deadline to each loop and macro (nothing else can repeat), and limits to what makes values.

    They are attributes of the environment, which no variable of the template can shadow.
    """

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._calling("checked", node, unless=all(isinstance(item, nodes.Const) for item in node.items))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        is_small = node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items)
        return self._calling("checked", node, unless=is_small)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._calling("checked", node, unless=False)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        return self._calling("counted", node, unless=not isinstance(node.arg, nodes.Slice))

    def _calling(self, name: str, node: nodes.Expr, *, unless: bool) -> nodes.Node:
        self.generic_visit(node)
        if unless:
            return node
        function = nodes.EnvironmentAttribute(name, lineno=node.lineno)
        return nodes.Call(function, [node], [], None, None, lineno=node.lineno)

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
        size = nodes.Const(sum(len(text.data) for text in node.find_all(nodes.TemplateData)))
        tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
        call = nodes.Call(tick, [size], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


class _Generation(Extension):
    """`{% generation %}`, with which some templates mark the model's own output. Renders its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compiled(source: str) -> tuple[jinja2.Template, frozenset[str], bool]:
    """The template, the variables that it reads, and whether it reads a `text`, as of one in a message's content.

    Constants are computed here. Raises errors of jinja2 and of the compiler.
    """
    environment = Environment()
    parsed = environment.parse(source)
    variables = frozenset(meta.find_undeclared_variables(parsed))
    reads_text = any(each.attr == "text" for each in parsed.find_all(nodes.Getattr)) or any(
        each.value == "text" for each in parsed.find_all(nodes.Const)
    )
    return environment.from_string(_Bounded().visit(parsed)), variables, reads_text


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
    if len(form) > 1000:
        raise LimitReached("the format of a date is longer than 1000 characters")
    return datetime.now().strftime(form)
