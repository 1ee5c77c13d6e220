"""The items of a response while they are generated: what each event adds, and the items themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from router_svc.api.openai.read_message import call_id
from router_svc.api.responses.conversation import encode_thinking
from router_svc.api.responses.custom_input import CustomInput
from router_svc.api.responses.encoding import EncodedList
from router_svc.api.responses.item_ids import item_id
from router_svc.api.responses.tools import Names
from router_svc.messages.events import CallArguments, CallOpened, Event, Text

#: A server-sent event without its number.
Shown = dict[str, Any]


class ResponseOutput:
    """The items of one response, in order. At most the last one is open."""

    def __init__(self, response_id: str, names: Names, *, encodes_thinking: bool, id_characters: int) -> None:
        """`id_characters`: how long the ids of calls may be, as the model's template takes them."""
        self._response_id = response_id
        self._names = names
        self._encodes_thinking = encodes_thinking
        self._id_characters = id_characters
        self._items: list[_Item] = []
        self._logprobs: list[Any] = []

    def items(self) -> list[Mapping[str, Any]]:
        """The items as they are now."""
        return [item.shown() for item in self._items]

    def said(self) -> list[Mapping[str, Any]]:
        """The items as a conversation goes on from them."""
        return [item.said() for item in self._items]

    def drop(self) -> None:
        """Forgets all items."""
        self._items.clear()

    def add(self, events: Iterable[Event], logprobs: list[Any]) -> Iterator[Shown]:
        """What new output shows. `logprobs` are those of its tokens; they go with the text of messages.

        Tokens of a message whose text is held back count with the text that comes next.
        """
        self._logprobs += logprobs
        for event in events:
            match event:
                case Text(text=text, is_thinking=is_thinking):
                    before = len(self._items)
                    yield from self._open("reasoning" if is_thinking else "message")
                    if len(self._items) > before:
                        self._logprobs = logprobs
                    yield from self._items[-1].delta(text, self._taken_logprobs())
                case CallOpened(name=name):
                    yield from self._open_call(name)
                case CallArguments(text=text):
                    yield from self._items[-1].delta(text, [])

    def finish(self, *, is_complete: bool) -> Iterator[Shown]:
        """What the end of the output shows. A response has at least one item."""
        if not self._items:
            yield from self._open("message")
        yield from self._items[-1].close("completed" if is_complete else "incomplete")

    def abandon(self) -> None:
        """The last item will not be complete."""
        if self._items:
            self._items[-1].abandon()

    def _taken_logprobs(self) -> list[Any]:
        taken, self._logprobs = self._logprobs, []
        return taken if self._items[-1].type == "message" else []

    def _open(self, kind: str) -> Iterator[Shown]:
        if self._items and self._items[-1].type == kind:
            return
        encodes = self._encodes_thinking and kind == "reasoning"
        cls = _Thinking if kind == "reasoning" else _Message
        yield from self._start(cls(self._id_of(kind), len(self._items), encodes=encodes))

    def _open_call(self, name: str) -> Iterator[Shown]:
        tool, index = self._names.of(name), len(self._items)
        kind = "custom_tool_call" if tool.is_custom else "function_call"
        calls = sum(isinstance(item, _Call) for item in self._items)
        fields = {"call_id": call_id(self._response_id, 0, calls, characters=self._id_characters), "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        cls = _CustomCall if tool.is_custom else _Call
        yield from self._start(cls(self._id_of(kind), index, fields))

    def _start(self, item: _Item) -> Iterator[Shown]:
        if self._items:
            yield from self._items[-1].close("completed")
        self._items.append(item)
        yield from item.open()

    def _id_of(self, kind: str) -> str:
        return item_id(kind, self._response_id, len(self._items))


class _Item:
    """One item, with what all have in common."""

    type: str

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._status = "in_progress"
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._text)

    def abandon(self) -> None:
        """It will not be complete."""
        if self._status == "in_progress":
            self._status = "incomplete"

    def shown(self) -> Mapping[str, Any]:
        """The item as it is now."""
        raise NotImplementedError

    def said(self) -> Mapping[str, Any]:
        """The item as a conversation goes on from it."""
        return self.shown()

    def open(self) -> Iterator[Shown]:
        """The events of its start."""
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self.shown()}

    def delta(self, text: str, logprobs: list[Any]) -> Iterator[Shown]:
        """The events of more text."""
        raise NotImplementedError

    def close(self, status: str) -> Iterator[Shown]:
        """The events of its end."""
        self._status = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.shown()}

    def _ids(self) -> Shown:
        return {"item_id": self._id, "output_index": self._index}


class _TextItem(_Item):
    """An item whose text is in one element of its content."""

    content_type: str
    event: str

    def content(self) -> Mapping[str, Any]:
        """The element as it is now."""
        return {"type": self.content_type, "text": self.text}

    def open(self) -> Iterator[Shown]:
        """The item, and the element."""
        yield from super().open()
        yield {"type": "response.content_part.added", **self._ids(), "content_index": 0, "part": self.content()}
        self._has_content = True

    def close(self, status: str) -> Iterator[Shown]:
        """The whole text, the element and the item."""
        text = {"text": self.text, **self.more_of_text()}
        yield {"type": f"response.{self.event}.done", **self._ids(), "content_index": 0, **text}
        yield {"type": "response.content_part.done", **self._ids(), "content_index": 0, "part": self.content()}
        yield from super().close(status)

    def more_of_text(self) -> Shown:
        """Further fields of the event with the whole text."""
        return {}

    _has_content = False


class _Message(_TextItem):
    """Text for the client."""

    type = "message"
    content_type = "output_text"
    event = "output_text"

    def __init__(self, item_id: str, index: int, *, encodes: bool = False) -> None:
        super().__init__(item_id, index)
        self._logprobs = EncodedList()

    def content(self) -> Mapping[str, Any]:
        """The text, without annotations."""
        return {**super().content(), "annotations": [], "logprobs": self._logprobs.now()}

    def shown(self) -> Mapping[str, Any]:
        """The message."""
        return self._with(self.content())

    def said(self) -> Mapping[str, Any]:
        """The message without log-probabilities."""
        return self._with(super().content())

    def _with(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        shown = [content] if self._has_content else []
        return {"id": self._id, "type": "message", "status": self._status, "role": "assistant", "content": shown}

    def more_of_text(self) -> Shown:
        """The log-probabilities of its tokens."""
        return {"logprobs": self._logprobs.now()}

    def delta(self, text: str, logprobs: list[Any]) -> Iterator[Shown]:
        """New text."""
        self._text.append(text)
        fields = {"content_index": 0, "delta": text, "logprobs": self._logprobs.add(logprobs)}
        yield {"type": "response.output_text.delta", **self._ids(), **fields}


class _Thinking(_TextItem):
    """The model's thinking."""

    type = "reasoning"
    content_type = "reasoning_text"
    event = "reasoning_text"

    def __init__(self, item_id: str, index: int, *, encodes: bool) -> None:
        super().__init__(item_id, index)
        self._encodes = encodes

    def shown(self) -> Mapping[str, Any]:
        """The thinking, which has no summary."""
        content = [self.content()] if self._has_content else []
        shown = {"id": self._id, "type": "reasoning", "status": self._status, "summary": [], "content": content}
        is_whole = self._encodes and self._status != "in_progress"
        return {**shown, "encrypted_content": encode_thinking(self.text)} if is_whole else shown

    def delta(self, text: str, logprobs: list[Any]) -> Iterator[Shown]:
        """New thinking."""
        self._text.append(text)
        yield {"type": "response.reasoning_text.delta", **self._ids(), "content_index": 0, "delta": text}


class _Call(_Item):
    """A call of a function."""

    type = "function_call"
    event = "function_call_arguments"
    field = "arguments"

    def __init__(self, item_id: str, index: int, fields: Mapping[str, str]) -> None:
        """`fields`: the id and the name of what is called."""
        super().__init__(item_id, index)
        self._fields = fields

    def shown(self) -> Mapping[str, Any]:
        """The call."""
        return {"id": self._id, "type": self.type, "status": self._status, **self._fields, self.field: self.text}

    def delta(self, text: str, logprobs: list[Any]) -> Iterator[Shown]:
        """More of the arguments."""
        self._text.append(text)
        yield {"type": f"response.{self.event}.delta", **self._ids(), "delta": text}

    def close(self, status: str) -> Iterator[Shown]:
        """All of the arguments, and the item."""
        yield {"type": f"response.{self.event}.done", **self._ids(), **self.whole()}
        yield from super().close(status)

    def whole(self) -> Shown:
        """What the event at the end of the arguments has."""
        return {"arguments": self.text, "name": self._fields["name"]}


class _CustomCall(_Call):
    """A call of a custom tool."""

    type = "custom_tool_call"
    event = "custom_tool_call_input"
    field = "input"

    def __init__(self, item_id: str, index: int, fields: Mapping[str, str]) -> None:
        super().__init__(item_id, index, fields)
        self._input = CustomInput()

    def delta(self, text: str, logprobs: list[Any]) -> Iterator[Shown]:
        """More of the input, if the arguments complete any."""
        new = self._input.add(text)
        if new:
            yield from super().delta(new, logprobs)

    def whole(self) -> Shown:
        """What the event at the end of the input has."""
        return {"input": self.text}
