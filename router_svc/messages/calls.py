"""Reads calls of tools while they are generated: the name as soon as it is there, then the arguments as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from router_svc.messages.events import CallArguments, CallOpened, Event
from router_svc.messages.json_reader import NotJson, ObjectReader, ValueReader, string_of
from router_svc.messages.template import CallFields, Parameters, Region

#: The types of each parameter of each tool, as in JSON schemas.
ToolTypes = Mapping[str, Mapping[str, frozenset[str]]]
_STRING = frozenset({"string"})


class CallReader(Protocol):
    """Reads the calls of one region."""

    #: Whether nothing more belongs to the calls.
    is_complete: bool
    #: Index of the next call in the message.
    next_index: int
    #: What was read while no name was known.
    source: str

    def take(self, text: str, start: int, events: list[Event], *, is_end: bool) -> int:
        """Reads `text[start:]`, and returns where it stopped: at the end of the calls, or at what is not complete.

        Raises `NotJson` for what is no call.
        """


def call_reader(
    region: Region, delimiter: str, name: str | None, index: int, tools: ToolTypes, events: list[Event]
) -> CallReader:
    """The reader of a region. If the delimiter has the call's name, the call is opened with it."""
    assert region.call is not None
    if name is not None and name not in tools:
        return _NoCall(delimiter, index)
    if name is None:
        return _JsonReader(region.call, delimiter, index, tools)
    events.append(CallOpened(index, name))
    if region.parameters is not None:
        return _ParametersReader(region.parameters, index, tools[name])
    return _NamedReader(index)


class _NoCall:
    """What looks like a call of a function that is not there."""

    is_complete = False

    def __init__(self, delimiter: str, index: int) -> None:
        self.source = delimiter
        self.next_index = index

    def take(self, text: str, start: int, events: list[Event], *, is_end: bool) -> int:
        raise NotJson


class _NamedReader:
    """Arguments are the whole region."""

    source = ""

    def __init__(self, index: int) -> None:
        self._index = index
        self._value = ValueReader()
        self.is_complete = False
        self.next_index = index + 1

    def take(self, text: str, start: int, events: list[Event], *, is_end: bool) -> int:
        try:
            first, end = self._value.take(text, start)
        except NotJson:
            # A call without arguments, whose name the client has.
            self.is_complete = True
            return start
        if end > first:
            events.append(CallArguments(self._index, text[first:end]))
        self.is_complete = self._value.is_complete
        return end


class _JsonReader:
    """An object with the name and the arguments, or a list of such objects."""

    def __init__(self, fields: CallFields, delimiter: str, index: int, tools: ToolTypes) -> None:
        self._fields = fields
        self._tools = tools
        self._is_in_list = not fields.is_list
        self._object = ObjectReader(self._on_value)
        self._name_text = ""
        self._has_name = False
        #: Arguments that came before the name.
        self._early = ""
        #: Arguments that models write as a string with JSON in it.
        self._quoted: str | None = None
        self._has_arguments = False
        self._events: list[Event] = []
        self.is_complete = False
        self.next_index = self._first_index = index
        self.source = delimiter

    def take(self, text: str, start: int, events: list[Event], *, is_end: bool) -> int:
        self._events = events
        position, source = start, self.source
        while position < len(text) and not self.is_complete:
            before = position
            try:
                position = self._object.take(text, position) if self._is_in_list else self._enter_list(text, position)
                if not self._has_name:
                    self.source += text[before:position]
                if self._object.is_complete:
                    self._end_object()
            except NotJson:
                if self.next_index == self._first_index:
                    self.source = source  # The caller still has this text.
                    raise
                # The client has a call of this region, so the rest of it is no text.
                self.is_complete = True
                return max(self._object.position, position)
        return position

    def _enter_list(self, text: str, position: int) -> int:
        """One character between the objects of a list."""
        character = text[position]
        if character == "]":
            self.is_complete = True
        elif character in "[,":
            self._is_in_list = True
        elif not character.isspace():
            raise NotJson
        return position + 1

    def _on_value(self, key: str, text: str, is_complete: bool) -> None:
        if key == self._fields.name_key:
            self._name_text += text
            if is_complete:
                self._open()
        elif self._fields.arguments_keys is not None and key in self._fields.arguments_keys:
            self._argue(text, is_complete)

    def _open(self) -> None:
        name = string_of(self._name_text)
        if name not in self._tools:
            raise NotJson
        self._has_name, self.source = True, ""
        self._events.append(CallOpened(self.next_index, name))
        self.next_index += 1
        self._send(self._early)

    def _argue(self, text: str, is_complete: bool) -> None:
        if not self._has_arguments and text.startswith('"'):
            self._quoted = ""
        self._has_arguments = True
        if self._quoted is not None:
            self._quoted += text
            text = _unquoted(self._quoted) if is_complete else ""
        if self._has_name:
            self._send(text)
        else:
            self._early += text

    def _send(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.next_index - 1, text))

    def _end_object(self) -> None:
        if not self._has_name:
            raise NotJson
        if not self._has_arguments:
            self._send("{}")
        self._name_text, self._early, self._quoted = "", "", None
        self._has_name = self._has_arguments = self._is_in_list = False
        self._object = ObjectReader(self._on_value)
        self.is_complete = not self._fields.is_list


class _ParametersReader:
    """Arguments one by one, from which JSON is made."""

    source = ""

    def __init__(self, form: Parameters, index: int, types: Mapping[str, frozenset[str]]) -> None:
        self._form = form
        self._index = index
        self._types = types
        self._count = 0
        self._key: str | None = None
        #: A value that is no string is sent when it is complete.
        self._value = ""
        self.is_complete = False
        self.next_index = index + 1

    def take(self, text: str, start: int, events: list[Event], *, is_end: bool) -> int:
        position = start
        while not self.is_complete:
            step = self._between if self._key is None else self._in_value
            before = (position, self._key)
            position = step(text, position, events, is_end)
            if (position, self._key) == before and not self.is_complete:
                break
        return position

    def _between(self, text: str, start: int, events: list[Event], is_end: bool) -> int:
        found = self._form.opens.pattern.match(text, start, partial=not is_end)
        if found is not None and not is_end and (found.partial or found.end() == len(text)):
            return start
        if found is None:
            if not is_end or start < len(text):
                self._send("}" if self._count else "{}", events)
                self.is_complete = True
            return start
        self._key = found["key"]
        opening = ("," if self._count else "{") + json.dumps(self._key, ensure_ascii=False) + ":"
        self._count += 1
        self._send(opening + ('"' if self._is_text else ""), events)
        return int(found.end())

    @property
    def _is_text(self) -> bool:
        return self._types.get(self._key or "", _STRING) == _STRING

    def _in_value(self, text: str, start: int, events: list[Event], is_end: bool) -> int:
        found = self._form.closes.pattern.search(text, start, partial=not is_end)
        is_open = found is None or (not is_end and (found.partial or found.end() == len(text)))
        end = len(text) if found is None else found.start()
        value = text[start:end]
        if self._is_text:
            self._send(json.dumps(value, ensure_ascii=False)[1:-1], events)
        else:
            self._value += value
        if found is None or is_open:
            return end
        self._send('"' if self._is_text else _typed(self._value, self._types[self._key or ""]), events)
        self._key, self._value = None, ""
        return int(found.end())

    def _send(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._index, text))


def _unquoted(text: str) -> str:
    try:
        return string_of(text)
    except NotJson:
        return text


def _typed(text: str, types: frozenset[str]) -> str:
    """A value as JSON: of one of the types if its text is, else a string."""
    stripped = text.strip()
    candidate = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    try:
        value = json.loads(candidate, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    names = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"}}
    names |= {str: {"string"}, list: {"array"}, dict: {"object"}}
    if types and not types & names[type(value)]:
        return json.dumps(text, ensure_ascii=False)
    return candidate


def _refuse(constant: str) -> None:
    raise ValueError(constant)
