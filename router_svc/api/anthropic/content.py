"""The content of a message: from what the parser reads to blocks, streamed and whole. Pure.

A whole message is made of the events of its stream, so that both have the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from router_svc.api.anthropic.answers import (
    AnyDelta,
    BlockAnswer,
    BlockEvent,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
)
from router_svc.api.anthropic.signatures import Signature, Signer
from router_svc.api.json_pieces import object_to_json, text_to_json, to_json
from router_svc.messages.events import CallArguments, CallOpened, Event, Text, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRules:
    """What the client gets of a message."""

    signer: Signer
    #: The id of a call, from its number in the message.
    call_id: Callable[[int], str]
    #: Whether there are blocks of thinking, and whether they have its text.
    shows_thinking: bool = True
    omits_thinking: bool = False


class ContentWriter:
    """Turns one message into the events of its blocks. Neighbouring text of one kind is one block."""

    def __init__(self, rules: ContentRules) -> None:
        self._rules = rules
        #: Number of the next block.
        self._index = 0
        #: The block that is open, and its signature if it is thinking.
        self._open: BlockAnswer | None = None
        self._signature: Signature | None = None

    def push(self, events: Iterable[Event]) -> list[BlockEvent]:
        """The events of more content."""
        made: list[BlockEvent] = []
        for event in merged(events):
            match event:
                case Text(is_thinking=True):
                    if self._rules.shows_thinking:
                        self._think(event.text, made)
                case Text():
                    text: TextAnswer = {"type": "text", "text": ""}
                    self._enter(text, made)
                    self._add({"type": "text_delta", "text": event.text}, made)
                case CallOpened():
                    self._close(made)
                    call_id = self._rules.call_id(event.index)
                    call: ToolUseAnswer = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
                    self._enter(call, made)
                case CallArguments():
                    self._add({"type": "input_json_delta", "partial_json": event.text}, made)
        return made

    def finish(self) -> list[BlockEvent]:
        """The events of the end. A message without content has one block, with an empty text."""
        made: list[BlockEvent] = []
        if not self._index:
            self._enter({"type": "text", "text": ""}, made)
        self._close(made)
        return made

    def _think(self, text: str, made: list[BlockEvent]) -> None:
        thinking: ThinkingAnswer = {"type": "thinking", "thinking": "", "signature": ""}
        if self._enter(thinking, made):
            self._signature = self._rules.signer.start()
        assert self._signature is not None
        self._signature.add(text)
        if not self._rules.omits_thinking:
            self._add({"type": "thinking_delta", "thinking": text}, made)

    def _enter(self, block: BlockAnswer, made: list[BlockEvent]) -> bool:
        """Opens the block, unless one of its kind is open. Returns whether it did."""
        if self._open is not None and self._open["type"] == block["type"]:
            return False
        self._close(made)
        made.append({"type": "content_block_start", "index": self._index, "content_block": block})
        self._open = block
        self._index += 1
        return True

    def _add(self, delta: AnyDelta, made: list[BlockEvent]) -> None:
        made.append({"type": "content_block_delta", "index": self._index - 1, "delta": delta})

    def _close(self, made: list[BlockEvent]) -> None:
        if self._open is None:
            return
        if self._signature is not None:
            self._add({"type": "signature_delta", "signature": self._signature.text()}, made)
            self._signature = None
        made.append({"type": "content_block_stop", "index": self._index - 1})
        self._open = None


@dataclass(slots=True)
class WholeContent:
    """Collects the events of a message."""

    _blocks: list[tuple[BlockAnswer, list[str]]] = field(default_factory=list)

    def add(self, events: Iterable[BlockEvent]) -> None:
        """More of the content."""
        for event in events:
            if event["type"] == "content_block_start":
                self._blocks.append((event["content_block"], []))
            elif event["type"] == "content_block_delta":
                block, pieces = self._blocks[-1]
                delta = event["delta"]
                match delta["type"]:
                    case "text_delta":
                        pieces.append(delta["text"])
                    case "thinking_delta":
                        pieces.append(delta["thinking"])
                    case "input_json_delta":
                        pieces.append(delta["partial_json"])
                    case "signature_delta":
                        assert block["type"] == "thinking"
                        block["signature"] = delta["signature"]

    def to_json(self) -> Iterator[bytes]:
        """The list of blocks, in pieces."""
        yield b"["
        for index, (block, pieces) in enumerate(self._blocks):
            yield b"," if index else b""
            yield _block_to_json(block, "".join(pieces))
        yield b"]"


def _block_to_json(block: BlockAnswer, content: str) -> bytes:
    match block["type"]:
        case "text":
            return b'{"type":"text","text":%b}' % text_to_json(content)
        case "thinking":
            signature = to_json(block["signature"])
            return b'{"type":"thinking","thinking":%b,"signature":%b}' % (text_to_json(content), signature)
        case _:
            return b'%b,"input":%b}' % (
                to_json({**block, "input": None})[: -len(b',"input":null}')],
                object_to_json(content),
            )
