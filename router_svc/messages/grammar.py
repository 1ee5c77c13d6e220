"""The grammar of a message with tools or thinking, so that each call can be read and has arguments of its schema.

Text is free until what opens a call. From there on, only a call is possible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import regex

from router_svc.messages.formats import MessageFormat, WrittenCall
from router_svc.messages.lark import quoted
from router_svc.messages.parameter_grammar import Parameter, ParameterRules


class Calls(Enum):
    """Which calls a message may have."""

    NONE = "none"
    AUTO = "auto"
    #: At least one, and no text.
    REQUIRED = "required"


class Thinking(Enum):
    """How a message may think."""

    NONE = "none"
    OPTIONAL = "optional"
    #: The prompt has opened the thinking.
    OPENED = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that may be called."""

    name: str
    #: Grammars of the library's form, of which the first is that of the arguments as JSON.
    arguments: Sequence[Mapping[str, Any]] = ()
    #: The arguments where they are written one by one.
    parameters: Sequence[Parameter] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRules:
    """What a message may consist of."""

    calls: Calls = Calls.NONE
    tools: Sequence[CallableTool] = ()
    is_parallel: bool = True
    thinking: Thinking = Thinking.NONE
    #: Grammars of the text for the client, of which the first is the whole; empty: any text.
    text: Sequence[Mapping[str, Any]] = ()


def message_grammar(form: MessageFormat, rules: MessageRules, special_tokens: Mapping[str, int]) -> str:
    """The grammar's text. `special_tokens`: ids of the tokens that are no text, by what they look like."""
    return _Builder(form, rules, special_tokens).build()


@dataclass
class _Builder:
    form: MessageFormat
    rules: MessageRules
    special_tokens: Mapping[str, int]
    lines: list[str] = field(default_factory=lambda: ["%llguidance {}"])
    grammars: list[Mapping[str, Any]] = field(default_factory=list)

    def build(self) -> str:
        """The text."""
        sequence = [*self._thinking(), self._body()]
        self.lines.insert(1, f"start: {' '.join(sequence)}")
        self.lines.append(r"TEXT: /(.|\n)*/")
        self.lines.append(r"GAP: /\n{0,2}/")
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(self.lines)}, *self.grammars]})

    def _thinking(self) -> list[str]:
        kind = self.rules.thinking
        if kind is Thinking.NONE or self.form.thinking is None:
            return []
        opening, closing = self.form.thinking
        self._until("think_rest", closing)
        if kind is Thinking.OPENED:
            return ["think_rest GAP"]
        self._exactly("think_open", opening)
        return ["(think_open think_rest GAP)?"]

    def _body(self) -> str:
        calls = self.form.calls
        text = self._text()
        if calls is None or self.rules.calls is Calls.NONE:
            return text
        self._tools(calls)
        repeat = self.rules.is_parallel
        if calls.separator is not None:
            more = f"({self._literal(calls.separator)} tool)*" if repeat else ""
            closing = f"{more} {self._literal(calls.closing)}"
        else:
            closing = ""
        first = f"{self._literal(calls.trigger)} {self._literal(calls.head)} tool"
        if self.rules.calls is Calls.REQUIRED:
            more = f"(GAP {first})*" if repeat and calls.separator is None else ""
            return f"{first} {more} {closing}"
        if self.form.text_opening or self.rules.text:
            more = f"(GAP {first})*" if repeat and calls.separator is None else ""
            return f"({text} | {self._preamble(calls)} {first} {more} {closing})"
        call = f"({' | '.join(self._heads(calls))}) tool"
        if calls.separator is not None:
            return f"({text} | {call} {closing})"
        return f"({call})* {text}" if repeat else f"({call} | {text})"

    def _heads(self, calls: WrittenCall) -> list[str]:
        """What free text and the start of a call behind it may be."""
        heads = []
        if calls.free_trigger:
            self.lines.append(f"free_head[lazy]: TEXT /{calls.free_trigger}/")
            heads.append("free_head")
        # Free text has no special tokens in it. A trigger that begins with one opens a call, too.
        if not calls.free_trigger or not self._plain_start(calls.trigger):
            self._until("head", calls.trigger)
            heads.append(f"head {self._literal(calls.head)}")
        return heads

    def _preamble(self, calls: WrittenCall) -> str:
        if calls.preamble is None:
            return ""
        opening, closing = calls.preamble
        self._until("preamble", closing)
        return f"({self._literal(opening)} preamble)?"

    def _text(self) -> str:
        opening = self._literal(self.form.text_opening)
        if self.rules.text:
            self._add("text", self.rules.text)
            return f"{opening} @text"
        calls = self.form.calls
        if calls is None or self.rules.calls is not Calls.NONE:
            return f"{opening} TEXT"
        before = self._plain_start(calls.trigger)
        if not before or (calls.separator is not None and calls.free_trigger):  # A token that free text cannot have.
            return f"{opening} TEXT"
        self.lines += ["ANY: /(?s:.*)/", f"WITHOUT_CALLS: ANY & ~(ANY {quoted(before)} ANY)"]
        return f"{opening} WITHOUT_CALLS"

    def _tools(self, calls: WrittenCall) -> None:
        options = []
        rules = None if calls.parameter is None else ParameterRules(calls.parameter, self.lines, self.grammars)
        for index, tool in enumerate(self.rules.tools):
            if rules is not None:
                arguments = rules.of_tool(tool.parameters)
            else:
                self._add(f"arguments_{index}", tool.arguments)
                arguments = f"@arguments_{index}"
            options.append(f"{self._literal(tool.name + calls.between)} {arguments} {self._literal(calls.end)}")
        self.lines.append("tool: " + "\n  | ".join(options))

    def _add(self, name: str, grammars: Sequence[Mapping[str, Any]]) -> None:
        self.grammars += [{**grammars[0], "name": name}, *grammars[1:]]

    def _until(self, rule: str, literal: str) -> None:
        """A rule of any text up to `literal`, and `literal` itself."""
        before, rest = self._split(literal)
        text = f"{rule}_text[lazy]: TEXT {quoted(before)}" if before else f"{rule}_text: TEXT"
        self.lines += [text, f"{rule}: {rule}_text {rest}"]

    def _exactly(self, rule: str, literal: str) -> None:
        """A rule of `literal`, which is never taken for free text."""
        before, rest = self._split(literal)
        if before:
            self.lines.append(f"{rule}_text[lazy]: {quoted(before)}")
            self.lines.append(f"{rule}: {rule}_text {rest}")
        else:
            self.lines.append(f"{rule}: {rest}")

    def _split(self, literal: str) -> tuple[str, str]:
        """The text before the first special token, and the rest as a sequence."""
        before = self._plain_start(literal)
        return before, self._literal(literal[len(before) :])

    def _plain_start(self, literal: str) -> str:
        pieces = self._pieces(literal)
        return "" if not pieces or pieces[0] in self.special_tokens else pieces[0]

    def _literal(self, literal: str) -> str:
        """Text and special tokens as a sequence of a rule."""
        return " ".join(
            f"<[{self.special_tokens[piece]}]>" if piece in self.special_tokens else quoted(piece)
            for piece in self._pieces(literal)
        )

    def _pieces(self, literal: str) -> list[str]:
        names = sorted((name for name in self.special_tokens if name and name in literal), key=len, reverse=True)
        if not names:
            return [literal] if literal else []
        return [piece for piece in regex.split(f"({'|'.join(map(regex.escape, names))})", literal) if piece]
