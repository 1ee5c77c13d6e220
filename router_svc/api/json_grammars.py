"""JSON schemas as grammars. A part that cannot be enforced is found, and refused with its path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.sampling import MAX_GRAMMAR
from pdserve.model.grammar_check import grammar_problem, has_no_text, is_too_large
from router_svc.api.json_keywords import (
    OF_LISTS,
    OF_NAMES,
    SINGLE,
    Path,
    reachable,
    reference_steps,
    subschemas,
    target_of,
)
from router_svc.api.json_library import BOUNDS, for_library
from router_svc.api.json_limits import not_enforced

#: Levels of a JSON schema, alone and with its references. llguidance's stack overflows at several times as many.
MAX_DEPTH, MAX_REFERRED_DEPTH = 64, 200
#: Objects and lists that are visited, at most, to find how deep a schema is.
_MAX_VISITS = 100_000
#: Characters of subschemas that are read again to find the one that cannot be enforced.
_MAX_SEARCHED = 1 << 20

#: White space between two tokens of JSON: at most one space, or a new line with its indentation. Without a bound, a
#: model can write white space until its tokens are spent.
_WHITESPACE = r"[ ]|\n[ ]{0,32}"
#: Escapes in strings. Without `\\u`, a text has one spelling: an unknown property cannot be a known one in disguise.
_ESCAPES = 'nrbtf\\"'
#: A key of llguidance's own, which would change how a schema is read.
_OPTIONS_KEY = "x-guidance"

#: How llguidance's errors start that say that no value matches.
_NO_VALUE = "Unsatisfiable schema"

JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whitespace:
    """How JSON is spaced."""

    #: A regular expression; None: the default.
    pattern: str | None = None
    is_disabled: bool = False

    @property
    def options(self) -> Mapping[str, object]:
        """As llguidance takes it."""
        if self.is_disabled:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.pattern or _WHITESPACE}


def json_grammar(schema: JsonSchema | str, whitespace: Whitespace, *, closes_objects: bool, param: str) -> str:
    """The grammar of a schema, which may be its text. Raises `RequestError` with the path of what is wrong.

    `closes_objects`: objects have no other properties than those that the schema names. `param`: the client's field.
    """
    read = _prepared(schema, closes_objects=closes_objects, param=param)
    grammar = _grammar_of(read, whitespace)
    if len(grammar) > MAX_GRAMMAR:
        raise TooLarge(
            f"`{param}` makes a grammar of {len(grammar)} characters (limit {MAX_GRAMMAR}). Send less.", param=param
        )
    if problem := grammar_problem(grammar):
        path, problem = ((), problem) if is_too_large(problem) else _located(read, problem, whitespace)
        where = ".".join((param, *_known(path, schema)))
        raise RequestError(f"`{where}` cannot be enforced: {_in_our_words(problem)}.", param=where)
    return grammar


def _known(path: Path, schema: JsonSchema | str) -> Iterator[str]:
    """The steps that the client's schema has, and not only that of the library."""
    at: Any = json.loads(schema) if isinstance(schema, str) else schema
    for step in path:
        at = target_of(at, (step,))
        if at is None:
            return
        yield step


def _in_our_words(problem: str) -> str:
    return "no value matches it" if problem.startswith(_NO_VALUE) else problem


def unchecked_json_grammar(schema: JsonSchema, whitespace: Whitespace, *, closes_objects: bool, param: str) -> str:
    """As `json_grammar`, but whether the library takes it is for the caller to find out."""
    return _grammar_of(_prepared(schema, closes_objects=closes_objects, param=param), whitespace)


def _prepared(schema: JsonSchema | str, *, closes_objects: bool, param: str) -> JsonSchema:
    """The schema as the library shall read it. Raises `RequestError` for what it would not enforce exactly."""
    read = _read(schema, param)
    if (found := not_enforced(read)) is not None:
        where = ".".join((param, *found[0]))
        raise RequestError(f"`{where}` cannot be enforced: {found[1]}.", param=where)
    made = for_library(_closed(read) if closes_objects else read)
    if (path := _path_without_number(made)) is not None:
        where = ".".join((param, *path, "multipleOf"))
        raise RequestError(f"`{where}` cannot be enforced: no multiple within the bounds can be written.", param=where)
    return made


def _path_without_number(schema: JsonSchema) -> Path | None:
    """The path of a subschema whose bounds have no multiple that can be written; None: there is none."""
    numbers: dict[str, Path] = {}
    for path, subschema in reachable(schema):
        own = {name: subschema[name] for name in ("multipleOf", *BOUNDS) if name in subschema}
        if "multipleOf" in own and len(own) > 1:
            numbers.setdefault(_grammar_of({"type": "number", **own}, Whitespace()), path)
    checked = (path for grammar, path in numbers.items() if not grammar_problem(grammar) and has_no_text(grammar))
    return next(checked, None)


def _read(schema: JsonSchema | str, param: str) -> JsonSchema:
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR:  # Reading it takes the interpreter's lock, and nothing has counted its values.
            raise TooLarge(f"`{param}` has {len(schema)} characters (limit {MAX_GRAMMAR}). Send less.", param=param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"`{param}` is not JSON: {error}.", param=param) from error
    if not isinstance(schema, dict):
        raise RequestError(f"`{param}` must be a JSON schema, which is an object.", param=param)
    if _OPTIONS_KEY in schema:
        raise RequestError(f"`{param}` may not have `{_OPTIONS_KEY}`.", param=param)
    _Bounds(schema, param).check()
    try:
        # As the library reads it: without NaN, infinities and halves of surrogate pairs.
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise RequestError(f"`{param}` is not JSON: {error}.", param=param) from error
    return schema


def _grammar_of(schema: JsonSchema, whitespace: Whitespace) -> str:
    options: Any = {**whitespace.options, "lenient": False, "coerce_one_of": False, "json_allowed_escapes": _ESCAPES}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _located(root: JsonSchema, problem: str, whitespace: Whitespace) -> tuple[Path, str]:
    """The innermost keyword that alone has the problem, as far as it is found in reasonable time, and its problem."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    path: Path = ()
    schema, budget = root, _MAX_SEARCHED
    while True:
        for steps, child in subschemas(schema):
            if not isinstance(child, dict):
                continue
            grammar = _grammar_of({**shared, **child}, whitespace)
            budget -= len(grammar)
            if budget < 0:
                return path, problem
            if _is_same(found := grammar_problem(grammar), problem):
                path, schema, problem = (*path, *steps), child, found
                break
        else:
            return (*path, *_keyword(schema, problem, shared, whitespace, budget)), problem


_ANNOTATIONS = frozenset({"title", "description", "examples", "$comment", "deprecated", "readOnly", "writeOnly"})


def _is_same(problem: str, other: str) -> bool:
    """Whether both are one problem. "No value matches" has other words for a schema that contains another one."""
    return problem == other or (problem.startswith(_NO_VALUE) and other.startswith(_NO_VALUE))


def _keyword(schema: JsonSchema, problem: str, shared: JsonSchema, whitespace: Whitespace, budget: int) -> Path:
    """The keyword without which the schema does not have the problem, by preference one that the problem names."""
    for keyword in sorted(schema.keys() - shared.keys(), key=lambda keyword: (keyword not in problem, keyword)):
        others = {name: value for name, value in schema.items() if name != keyword}
        grammar = _grammar_of({**shared, **others}, whitespace)
        budget -= len(grammar)
        if budget < 0:
            break
        if grammar_problem(grammar) != problem:
            return (keyword,)
    return ()


def _closed(schema: Any) -> Any:
    """The schema, in which objects have no other properties than those that it names."""
    return _mapped(schema, lambda own: own | ({"additionalProperties": False} if _names_properties(own) else {}))


def _names_properties(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema and "additionalProperties" not in schema


def without_annotations(schema: Any) -> Any:
    """The schema without what only describes. It makes half of the text of most tools."""
    return _mapped(schema, lambda own: {name: value for name, value in own.items() if name not in _ANNOTATIONS})


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema after a change of it and of all subschemas."""
    if not isinstance(schema, dict):
        return schema
    own = change(dict(schema))
    for keyword in OF_NAMES:
        if isinstance(own.get(keyword), dict):
            own[keyword] = {name: _mapped(child, change) for name, child in own[keyword].items()}
    for keyword in OF_LISTS:
        if isinstance(own.get(keyword), list):
            own[keyword] = [_mapped(child, change) for child in own[keyword]]
    for keyword in SINGLE:
        if isinstance(own.get(keyword), dict):
            own[keyword] = _mapped(own[keyword], change)
    return own


class _Bounds:
    """Checks how deep a schema goes, references included: llguidance's stack grows with that, and could overflow."""

    def __init__(self, root: Mapping[str, Any], param: str) -> None:
        self._root, self._param = root, param
        self._left = _MAX_VISITS
        #: The deepest level at which a reference was followed.
        self._followed_at: dict[str, int] = {}

    def check(self) -> None:
        """Raises `RequestError`."""
        self._visit(self._root, (), 0, frozenset())

    def _visit(self, value: Any, path: tuple[str, ...], level: int, following: frozenset[str]) -> None:
        self._left -= 1
        if level > (MAX_REFERRED_DEPTH if following else MAX_DEPTH) or self._left < 0:
            raise RequestError(
                f"`{self._param}` has more than {MAX_DEPTH} levels, or {MAX_REFERRED_DEPTH} with its references.",
                param=self._param,
            )
        if isinstance(value, dict):
            self._follow(value, path, level, following)
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for name, child in children:
            if isinstance(child, dict | list):
                self._visit(child, (*path, str(name)), level + 1, following)

    def _follow(self, schema: dict[str, Any], path: tuple[str, ...], level: int, following: frozenset[str]) -> None:
        where = ".".join((self._param, *path))
        if path and isinstance(schema.get("$id"), str):
            where += ".$id"
            raise RequestError(f"`{where}` cannot be enforced: references are those of the whole schema.", param=where)
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference == "#":
            return
        steps = reference_steps(reference)
        if steps is None:
            raise RequestError(f"`{where}.$ref` does not start with `#/`.", param=f"{where}.$ref")
        if reference in following or self._followed_at.get(reference, -1) >= level:
            return
        self._followed_at[reference] = level
        target = target_of(self._root, steps)
        if isinstance(target, dict | list):
            self._visit(target, path, level + 1, following | {reference})
