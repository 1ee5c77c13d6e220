"""Structural tags as grammars: free text and tags become rules, and each JSON schema a grammar of its own."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.sampling import MAX_GRAMMAR
from pdserve.model.grammar_check import grammar_problem
from router_svc.api.json_grammars import Whitespace, json_grammar
from router_svc.api.structural_tags import (
    AnyText,
    ConstString,
    Format,
    JsonSchemaContent,
    Or,
    RegexContent,
    Repeat,
    Sequence,
    Several,
    StructuralTag,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
    children,
)
from router_svc.messages.lark import quoted

#: Formats of a structural tag, and how deep they are nested. llguidance's stack grows with the depth.
MAX_FORMATS, MAX_FORMAT_DEPTH = 1000, 16
_SUFFIXES = {"optional": "?", "plus": "+", "star": "*"}
_ANYTHING = "/(?s:.*)/"


def tag_grammar(
    tag: StructuralTag | dict[str, Any] | str, whitespace: Whitespace, *, closes_objects: bool, param: str
) -> str:
    """The grammar of a structural tag, which may be its text. Raises `RequestError` with the path of what is wrong."""
    if not isinstance(tag, StructuralTag):
        tag = _read(tag, param)
    _require_light(tag.content, param)
    builder = _Builder(whitespace, closes_objects=closes_objects, param=param, is_older=tag.format is None)
    start = builder.output(tag.content, param if tag.format is None else f"{param}.format")
    lark = "\n".join(["%llguidance {}", f"start: {start}", *builder.lines])
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}, *builder.schemas]})
    if len(grammar) > MAX_GRAMMAR:
        raise TooLarge(
            f"`{param}` makes a grammar of {len(grammar)} characters (limit {MAX_GRAMMAR}). Send less.", param=param
        )
    if problem := grammar_problem(grammar):
        raise RequestError(f"`{param}` cannot be enforced: {problem}.", param=param)
    return grammar


def _read(given: dict[str, Any] | str, param: str) -> StructuralTag:
    try:
        if isinstance(given, str):
            return StructuralTag.model_validate_json(given)
        return StructuralTag.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        where = ".".join((param, *map(str, first["loc"])))
        raise RequestError(f"`{where}` is not valid: {first['msg']}.", param=where) from error


def _require_light(content: Format, param: str) -> None:
    layer, count = [content], 0
    for _ in range(MAX_FORMAT_DEPTH):
        count += len(layer)
        layer = [child for each in layer for child in children(each)]
        if count + len(layer) > MAX_FORMATS:
            raise TooLarge(f"`{param}` has more than {MAX_FORMATS} formats. Simplify it.", param=param)
        if not layer:
            return
    raise TooLarge(f"`{param}` has formats nested more than {MAX_FORMAT_DEPTH} levels deep. Flatten it.", param=param)


class _Builder:
    """Makes rules. A terminal is matched as a whole, so that what is regular becomes one."""

    def __init__(self, whitespace: Whitespace, *, closes_objects: bool, param: str, is_older: bool) -> None:
        self.lines: list[str] = []
        self.schemas: list[dict[str, Any]] = []
        self._whitespace, self._closes_objects = whitespace, closes_objects
        self._param, self._is_older = param, is_older

    def output(self, content: Format, path: str) -> str:
        """The expression of a format behind which nothing follows. Raises `RequestError`."""
        match content:
            case AnyText():
                return self._terminal(_without(content.excludes))
            case TriggeredTags():
                return self._triggered(content, path)
            case Sequence():
                *first, last = [(each, f"{path}.elements.{index}") for index, each in enumerate(content.elements)]
                return " ".join([*(self._bounded(each, where) for each, where in first), self.output(*last)])
        return self._bounded(content, path)

    def _bounded(self, content: Format, path: str) -> str:
        """The expression of a format whose end is known."""
        if (regular := _regular(content)) is not None:
            return self._terminal(regular)
        match content:
            case JsonSchemaContent():
                return self._schema(content.json_schema, f"{path}.json_schema")
            case Sequence() | Or():
                made = [self._bounded(each, f"{path}.elements.{i}") for i, each in enumerate(content.elements)]
                return f"({(' ' if isinstance(content, Sequence) else ' | ').join(made)})"
            case Several() | Repeat():
                return f"({self._bounded(content.content, f'{path}.content')}){_suffix(content)}"
            case Tag():
                return f"({quoted(content.begin)} {self._behind_begin(content, path)})"
            case TagsWithSeparator():
                return self._separated(content, path)
        raise RequestError(
            f"`{path}` of type `{content.type}` has no end. Move it to the end of the output, or make it the content "
            "of a tag.",
            param=path,
        )

    def _behind_begin(self, tag: Tag, path: str) -> str:
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        end = " | ".join(quoted(each) for each in ends if each)
        if isinstance(tag.content, AnyText):
            if not end:
                raise RequestError(
                    f"`{path}.end` is empty, so that the text before it has no end.", param=f"{path}.end"
                )
            terminal = self._terminal(f"{_without(tag.content.excludes)} ({end})")
            return self._rule(terminal, is_lazy=True)
        if (regular := _regular(tag.content)) is not None:
            return self._terminal(f"({regular}) ({end})" if end else regular)
        if self._is_older and isinstance(tag.content, JsonSchemaContent):
            content = self._schema(tag.content.json_schema, f"{path}.schema")
        else:
            content = self._bounded(tag.content, f"{path}.content")
        return f"{content} ({end})" if end else content

    def _triggered(self, content: TriggeredTags, path: str) -> str:
        text = self._terminal(_ANYTHING)
        heads = [self._rule(self._terminal(f"{_ANYTHING} {quoted(each)}"), is_lazy=True) for each in content.triggers]
        tags, whole = [], []
        unused = set(content.triggers)
        for index, tag in enumerate(content.tags):
            where = f"{path}.{'structures' if self._is_older else 'tags'}.{index}"
            trigger = self._trigger_of(tag, content.triggers, where)
            unused.discard(content.triggers[trigger])
            behind = self._rule(self._behind_begin(tag, where))
            rest = tag.begin[len(content.triggers[trigger]) :]
            tags.append(" ".join([heads[trigger], *([quoted(rest)] if rest else []), behind]))
            whole.append(f"{quoted(tag.begin)} {behind}")
        if unused:
            raise RequestError(f"`{path}.triggers`: no tag starts with {min(unused)!r}.", param=f"{path}.triggers")
        more = f"({' | '.join(tags)})"
        if content.stop_after_first:
            return f"({' | '.join(whole)})" if content.at_least_one else f"({more} | {text})"
        return f"({' | '.join(whole)}) {more}* {text}" if content.at_least_one else f"{more}* {text}"

    def _trigger_of(self, tag: Tag, triggers: list[str], path: str) -> int:
        found = [index for index, trigger in enumerate(triggers) if tag.begin.startswith(trigger)]
        if len(found) != 1:
            raise RequestError(
                f"`{path}.begin` starts with {len(found)} of the triggers. It has to start with exactly one.",
                param=f"{path}.begin",
            )
        return found[0]

    def _separated(self, content: TagsWithSeparator, path: str) -> str:
        made = [self._bounded(tag, f"{path}.tags.{index}") for index, tag in enumerate(content.tags)]
        one = self._rule(" | ".join(made))
        separator = quoted(content.separator) if content.separator else ""
        several = one if content.stop_after_first else f"{one} ({separator} {one})*"
        return f"({several})" if content.at_least_one else f"({several})?"

    def _schema(self, schema: dict[str, Any], path: str) -> str:
        made = json_grammar(schema, self._whitespace, closes_objects=self._closes_objects, param=path)
        [grammar] = json.loads(made)["grammars"]
        name = f"schema_{len(self.schemas)}"
        self.schemas.append(grammar | {"name": name})
        return f"@{name}"

    def _terminal(self, expression: str) -> str:
        return self._line(f"TERMINAL_{len(self.lines)}", expression)

    def _rule(self, expression: str, *, is_lazy: bool = False) -> str:
        return self._line(f"rule_{len(self.lines)}", expression, "[lazy]" if is_lazy else "")

    def _line(self, name: str, expression: str, options: str = "") -> str:
        self.lines.append(f"{name}{options}: {expression}")
        return name


def _regular(content: Format) -> str | None:
    """The expression of a format that is regular, for a terminal; None: it is not."""
    match content:
        case ConstString():
            return quoted(content.value)
        case RegexContent():
            return f"/{_in_slashes(content.pattern)}/"
        case Sequence() | Or():
            made = [_regular(each) for each in content.elements]
            joined = " " if isinstance(content, Sequence) else " | "
            return None if None in made else f"({joined.join(filter(None, made))})"
        case Several() | Repeat():
            inner = _regular(content.content)
            return None if inner is None else f"({inner}){_suffix(content)}"
    return None


def _suffix(content: Several | Repeat) -> str:
    if isinstance(content, Several):
        return _SUFFIXES[content.type]
    return f"{{{content.min},{content.max if content.max >= 0 else ''}}}"


def _without(excludes: list[str]) -> str:
    if not excludes:
        return _ANYTHING
    return f"({_ANYTHING} & ~({_ANYTHING} ({' | '.join(map(quoted, excludes))}) {_ANYTHING}))"


def _in_slashes(pattern: str) -> str:
    """A pattern in which a slash or a new line does not end the notation."""
    escaped = re.sub(
        r"\\(.)|(/)", lambda found: r"\/" if found[2] or found[1] == "/" else found[0], pattern, flags=re.S
    )
    return escaped.replace("\n", r"\n")
