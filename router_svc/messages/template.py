"""The form of a family's messages, read from a description in the language of transformers' `response_template`.

A message has regions: text between an opening and a closing delimiter. What is outside of them belongs to the field
without an opening delimiter. Three things are added to the language. `skip` has what is dropped between regions.
`"content": "json"` without a closing delimiter ends with the value. `"content": "parameters"` is a list of named
values, each between delimiters of its own, whose types follow from the schema of the tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import regex

from pdserve.base.errors import SetupError

CONTENT, THINKING, CALLS = "content", "thinking", "tool_calls"
#: The name of text that belongs to no field.
SKIPPED = "skipped"
#: Other names of the same fields.
_NAMES = {"reasoning": THINKING, "reasoning_content": THINKING}
_KEYS = frozenset(
    {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional"}
    | {"transform", "transform_each"}
)


@dataclass(frozen=True, slots=True)
class Delimiter:
    """What opens or closes a region."""

    pattern: regex.Pattern[str]
    #: Whether a match at the end of the text so far may be another one with more text.
    can_grow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFields:
    """Where a region has a call's name and arguments. None: the group of the delimiter, or the whole region."""

    name_key: str | None
    arguments_keys: frozenset[str] | None
    #: Whether the region is a list of such calls.
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How a region has arguments one by one."""

    opens: Delimiter
    closes: Delimiter


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A field of the message."""

    #: `CONTENT`, `THINKING`, `CALLS` or `SKIPPED`.
    name: str
    #: None: what is outside of all other regions.
    opens: Delimiter | None
    closes: Delimiter | None
    call: CallFields | None = None
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The form of a family's messages."""

    #: What precedes a message of the assistant in a prompt.
    anchor: regex.Pattern[str]
    regions: tuple[Region, ...]
    #: All delimiters' sources, in which special tokens are found that are more than decoration.
    delimiters: str

    @property
    def has_parameters(self) -> bool:
        """Whether arguments come one by one, so that their types follow from schemas."""
        return any(region.parameters is not None for region in self.regions)

    @property
    def has_thinking(self) -> bool:
        """Whether messages may have thinking."""
        return any(region.name == THINKING for region in self.regions)

    def only(self, *, calls: bool, thinking: bool) -> Template:
        """The form in which nothing is a call, or nothing is thinking, unless these are wanted."""
        without = {name for name, is_wanted in ((CALLS, calls), (THINKING, thinking)) if not is_wanted}
        kept = tuple(region for region in self.regions if region.name not in without)
        return replace(self, regions=kept)


def read_template(description: Mapping[str, Any], where: str) -> Template:
    """The template of a description. Raises `SetupError` with what cannot be read."""
    try:
        anchor = _delimiter(description, "start_anchor")
        if anchor is None:
            raise ValueError("`start_anchor` is missing")
        regions = tuple(_region(name, field) for name, field in description["fields"].items())
        if (skipped := _delimiter(description, "skip")) is not None:
            regions = (*regions, Region(name=SKIPPED, opens=skipped, closes=None))
        if sum(region.opens is None for region in regions) > 1:
            raise ValueError("more than one field has no `open`")
    except (KeyError, TypeError, ValueError, AttributeError, regex.error) as error:
        raise SetupError(
            f"{where} cannot be read: {error}. Name the form of the model's messages with --message-format."
        ) from error
    return Template(anchor=anchor.pattern, regions=regions, delimiters="\n".join(_delimiters(description["fields"])))


def _region(name: str, field: Mapping[str, Any]) -> Region:
    if unknown := field.keys() - _KEYS:
        raise ValueError(f"field `{name}` has unknown keys {sorted(unknown)}")
    kind = _NAMES.get(name, name)
    if kind not in (CONTENT, THINKING, CALLS):
        raise ValueError(f"field `{name}` is not known")
    if kind != CALLS and field.get("content", "text") != "text":
        raise ValueError(f"field `{name}` has content other than text")
    return Region(
        name=kind,
        opens=_delimiter(field, "open"),
        closes=_delimiter(field, "close"),
        call=_call(name, field) if kind == CALLS else None,
        parameters=_parameters(field) if field.get("content") == "parameters" else None,
    )


def _delimiter(field: Mapping[str, Any], key: str) -> Delimiter | None:
    if key in field:
        literals = [field[key]] if isinstance(field[key], str) else list(field[key])
        literals.sort(key=len, reverse=True)
        can_grow = any(a != b and a.startswith(b) for a in literals for b in literals)
        return Delimiter(regex.compile("|".join(map(regex.escape, literals)), regex.DOTALL), can_grow)
    source = field.get(f"{key}_pattern")
    return None if source is None else Delimiter(regex.compile(source, regex.DOTALL), True)


def _call(name: str, field: Mapping[str, Any]) -> CallFields:
    content, arguments = field.get("content", "text"), field.get("content_args", {})
    if content not in ("json", "parameters") or (content == "json" and arguments.keys() - {"allow_non_json"}):
        raise ValueError(f"field `{name}` has content {content!r} with {sorted(arguments)}")
    function, is_list = field["transform"]["function"], bool(field.get("transform_each", False))
    path = function["name"].strip("{}")
    is_key = is_list or path.startswith("content.")
    return CallFields(
        name_key=path.removeprefix("content.") if is_key else None,
        arguments_keys=_keys_of(function["arguments"]),
        is_list=is_list,
    )


def _keys_of(placeholder: str) -> frozenset[str] | None:
    path = placeholder.strip("{}")
    if path == "content":
        return None
    # Models mistake "arguments" for "parameters", and the other way round.
    return frozenset({path.removeprefix("content."), "arguments", "parameters"})


def _parameters(field: Mapping[str, Any]) -> Parameters:
    opens, closes = _delimiter(field["content_args"], "open"), _delimiter(field["content_args"], "close")
    if opens is None or closes is None or "key" not in opens.pattern.groupindex:
        raise ValueError("`content_args` of parameters have no `open_pattern` with a group `key`, or no `close`")
    return Parameters(opens=opens, closes=closes)


def _delimiters(fields: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Delimiters as texts; escapes of regular expressions are left out of patterns."""
    found: list[str] = []
    for field in fields.values():
        for key in ("open", "close", "open_pattern", "close_pattern"):
            value = field.get(key, [])
            found += [value] if isinstance(value, str) else value
    return [each.replace("\\", "") for each in found]
