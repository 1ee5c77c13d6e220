"""How families of models write messages. The parser reads `template`, and grammars make calls as `calls` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from router_svc.messages.template import Template, read_template


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """How a call is written: `trigger`, `head`, the name, `between`, the arguments, `end`."""

    #: After this, a call follows and nothing else.
    trigger: str
    #: The same within free text, as a regular expression; empty: the trigger and the head.
    free_trigger: str = ""
    head: str = ""
    between: str
    end: str
    #: What may be around text before the first call, where text for the client has an opening.
    preamble: tuple[str, str] | None = None
    #: What is between two calls, in place of the trigger; None: every call has a trigger of its own.
    separator: str | None = None
    #: What follows the last call.
    closing: str = ""
    #: Arguments are not JSON: each has delimiters of its own around name and value.
    parameter: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """One family's way to write messages."""

    name: str
    template: Template
    calls: WrittenCall | None = None
    #: What is around thinking; None: such models do not think aloud.
    thinking: tuple[str, str] | None = None
    #: All that ends thinking, if it is not only the closing; the first is what ends it early.
    thinking_closings: tuple[str, ...] = ()
    #: What text for the client starts with.
    text_opening: str = ""
    #: Characters of a call's id.
    id_characters: int = 24


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_JSON_CALL = {"repeats": True, "content": "json", "transform": _function("{content.name}", "{content.arguments}")}
_NAMED_CALL = {"repeats": True, "content": "json", "transform": _function("{name}", "{content}")}
_THINK = ("<think>", "</think>")
_THINKING = {"open": _THINK[0], "close": _THINK[1]}
#: White space in patterns: bounded, since the time that a search takes grows with it.
_GAP = r"\s{0,16}"
_NAME = r"(?P<name>[\w.-]{1,128})"
_LLAMA3_CALL = r'\{ ?(?:"type": ?"function", ?)?"name": ?"'
_IM_START = "<|im_start|>assistant\n"


def _hermes() -> MessageFormat:
    return MessageFormat(
        name="hermes",
        template=read_template(
            {
                "start_anchor": _IM_START,
                "fields": {
                    "thinking": _THINKING,
                    "content": {},
                    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", **_JSON_CALL},
                },
            },
            "hermes",
        ),
        calls=WrittenCall(
            trigger="<tool_call>",
            head='\n{"name": "',
            between='", "arguments": ',
            end="}\n</tool_call>",
        ),
        thinking=_THINK,
    )


def _qwen3_coder() -> MessageFormat:
    return MessageFormat(
        name="qwen3_coder",
        template=read_template(
            {
                "start_anchor": _IM_START,
                "skip": "</tool_call>",
                "fields": {
                    "thinking": _THINKING,
                    "content": {},
                    "tool_calls": {
                        "open_pattern": r"(?:<tool_call>\s{0,16})?<function=(?P<name>[^>\n]{1,128})>\s{0,16}",
                        "close_pattern": r"\s{0,16}</function>",
                        "repeats": True,
                        "content": "parameters",
                        "content_args": {
                            "open_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>\n?",
                            "close_pattern": r"\n?</parameter>\s{0,16}",
                        },
                        "transform": _function("{name}", "{content}"),
                    },
                },
            },
            "qwen3_coder",
        ),
        calls=WrittenCall(
            trigger="<tool_call>",
            free_trigger="<function=",
            head="\n<function=",
            between=">\n",
            end="</function>\n</tool_call>",
            parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        thinking=_THINK,
    )


def _llama3_json() -> MessageFormat:
    return MessageFormat(
        name="llama3_json",
        template=read_template(
            {
                "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
                "fields": {
                    "content": {},
                    "tool_calls": {
                        "open_pattern": rf"(?:<\|python_tag\|>|;\s{{0,16}})?(?={_LLAMA3_CALL})",
                        "repeats": True,
                        "content": "json",
                        "transform": _function("{content.name}", "{content.parameters}"),
                    },
                },
            },
            "llama3_json",
        ),
        calls=WrittenCall(
            trigger='{"name": "',
            free_trigger=_LLAMA3_CALL,
            between='", "parameters": ',
            end="}",
            separator='; {"name": "',
        ),
    )


def _mistral() -> MessageFormat:
    return MessageFormat(
        name="mistral",
        template=read_template(
            {
                "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
                "fields": {
                    "thinking": {"open": "[THINK]", "close": "[/THINK]"},
                    "content": {},
                    "tool_calls": {
                        "open_pattern": rf"\[TOOL_CALLS\]{_GAP}{_NAME}(?:\[CALL_ID\]\w*)?{_GAP}\[ARGS\]",
                        **_NAMED_CALL,
                    },
                },
            },
            "mistral",
        ),
        calls=WrittenCall(trigger="[TOOL_CALLS]", between="[ARGS]", end=""),
        thinking=("[THINK]", "[/THINK]"),
        id_characters=9,
    )


def _mistral_list() -> MessageFormat:
    return MessageFormat(
        name="mistral_list",
        template=read_template(
            {
                "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
                "fields": {
                    "content": {},
                    "tool_calls": {
                        "open": "[TOOL_CALLS]",
                        "content": "json",
                        "transform_each": True,
                        "transform": _function("{content.name}", "{content.arguments}"),
                    },
                },
            },
            "mistral_list",
        ),
        calls=WrittenCall(
            trigger="[TOOL_CALLS]",
            head=' [{"name": "',
            between='", "arguments": ',
            end="}",
            separator=', {"name": "',
            closing="]",
        ),
        id_characters=9,
    )


_CALLS_OPEN, _CALL_OPEN = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALL_NAME, _CALL_CLOSE, _CALLS_CLOSE = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


def _deepseek(name: str, kind: str, fence: tuple[str, str]) -> MessageFormat:
    """Version 3.1 writes the name alone, version 3 and R1 a kind before it and JSON in a fence."""
    opens = rf"(?:{_CALLS_OPEN})?{_GAP}{_CALL_OPEN}{_GAP}{kind}{_NAME}" + fence[0].replace("\n", _GAP)
    closes = fence[1].replace("\n", _GAP) + _GAP + _CALL_CLOSE
    return MessageFormat(
        name=name,
        template=read_template(
            {
                "start_anchor": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"],
                "skip": _CALLS_CLOSE,
                "fields": {
                    "thinking": _THINKING,
                    "content": {},
                    "tool_calls": {"open_pattern": opens, "close_pattern": closes, **_NAMED_CALL},
                },
            },
            name,
        ),
        calls=WrittenCall(
            trigger=_CALLS_OPEN,
            head=_CALL_OPEN + kind,
            between=fence[0],
            end=fence[1] + _CALL_CLOSE,
            separator=("\n" if kind else "") + _CALL_OPEN + kind,
            closing=_CALLS_CLOSE,
        ),
        thinking=_THINK,
    )


def _gpt_oss() -> MessageFormat:
    header, channel = r"(?:<\|start\|>assistant)?", r"<\|channel\|>(?:commentary|analysis)"
    name, rest = rf"{_GAP}to=functions\.{_NAME}", rf"{_GAP}(?:<\|constrain\|>)?\w*{_GAP}<\|message\|>"
    next_message = r"(?=<\|channel\|>|<\|start\|>)"
    return MessageFormat(
        name="gpt_oss",
        template=read_template(
            {
                "start_anchor": "<|start|>assistant",
                "fields": {
                    "thinking": {
                        "open_pattern": rf"{header}<\|channel\|>analysis<\|message\|>",
                        "close_pattern": rf"<\|end\|>|{next_message}",
                    },
                    "content": {
                        "open_pattern": rf"{header}<\|channel\|>(?:final|commentary){rest}",
                        "close_pattern": rf"<\|end\|>|<\|return\|>|{next_message}",
                    },
                    "tool_calls": {
                        "open_pattern": rf"{header}(?:{name}{channel}|{channel}{name}){rest}",
                        "close_pattern": rf"<\|call\|>|<\|end\|>|{next_message}",
                        **_NAMED_CALL,
                    },
                },
            },
            "gpt_oss",
        ),
        calls=WrittenCall(
            trigger="<|channel|>commentary to=functions.",
            preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
            between=" <|constrain|>json<|message|>",
            end="",
        ),
        thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        thinking_closings=("<|end|>", "<|channel|>", "<|start|>"),
        text_opening="<|channel|>final<|message|>",
    )


FORMATS: Mapping[str, MessageFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            _hermes(),
            _qwen3_coder(),
            _llama3_json(),
            _mistral(),
            _mistral_list(),
            _deepseek("deepseek_v3", f"function{_CALL_NAME}", ("\n```json\n", "\n```")),
            _deepseek("deepseek_v31", "", (_CALL_NAME, "")),
            _gpt_oss(),
        )
    }
)
