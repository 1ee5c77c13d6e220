"""How the messages of one chat are read: by the form of the model, and the tools of the request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.errors import StaleError
from router_svc.api.openai.tools import ToolUse
from router_svc.api.served_model import ServedModel
from router_svc.messages.calls import ToolTypes
from router_svc.messages.formats import MessageFormat
from router_svc.messages.grammar import Calls, Thinking
from router_svc.messages.model_messages import message_start
from router_svc.messages.parser import MessageParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReading:
    """How the messages of one request are read."""

    form: MessageFormat
    #: The tools that may be called, with the types of their parameters where the form needs them.
    tools: ToolTypes
    reads_calls: bool
    #: Messages are calls, and have no text.
    requires_call: bool = False
    #: The client has named the function that is called.
    is_named: bool
    #: Whether the model thinks at all.
    thinks: bool
    #: Whether the client gets the thinking.
    shows_thinking: bool
    #: What the prompt already has of the message.
    start: str

    def to_text(self) -> str:
        """As JSON. Of the form, the name: all of it is the model's."""
        tools = {name: {key: sorted(types) for key, types in each.items()} for name, each in self.tools.items()}
        values = {"tools": tools, "reads_calls": self.reads_calls, "is_named": self.is_named}
        values |= {"requires_call": self.requires_call, "thinks": self.thinks, "form": self.form.name}
        return json.dumps({**values, "shows_thinking": self.shows_thinking, "start": self.start})

    @classmethod
    def from_text(cls, text: str, form: MessageFormat | None) -> ChatReading:
        """The reading of such a text. Raises `StaleError` if this router reads messages by another form."""
        values = json.loads(text)
        if form is None or form.name != values["form"]:
            raise StaleError(
                f"The stream's messages are read as {values['form']}, and this router reads "
                f"{'plain text' if form is None else form.name}. Start all routers with the same --message-format."
            )
        tools = {name: {key: frozenset(types) for key, types in each.items()} for name, each in values["tools"].items()}
        return cls(
            form=form,
            tools=tools,
            reads_calls=values["reads_calls"],
            requires_call=values.get("requires_call", False),  # Routers of the last release do not say it.
            is_named=values["is_named"],
            thinks=values["thinks"],
            shows_thinking=values["shows_thinking"],
            start=values["start"],
        )

    def parser(self) -> MessageParser:
        """A parser of one message."""
        template = self.form.template.only(calls=self.reads_calls, thinking=self.thinks)
        return MessageParser(template, self.tools, prefix=self.start)


def chat_reading(
    model: ServedModel, use: ToolUse, prompt: Sequence[int], *, shows_thinking: bool
) -> ChatReading | None:
    """How the answers to this prompt are read; None: as plain text."""
    form = model.messages.form if use.tools else model.messages.thinking_form
    if form is None:
        return None
    return ChatReading(
        form=form,
        tools=use.types() if form.template.has_parameters else {name: {} for name in use.names},
        reads_calls=use.calls is not Calls.NONE,
        requires_call=use.calls is Calls.REQUIRED,
        is_named=use.is_named,
        shows_thinking=shows_thinking,
        thinks=model.messages.thinks,
        start=message_start(form, model.tokenizer, prompt),
    )


def thinking_of(reading: ChatReading) -> Thinking:
    """How an answer may think: what the prompt has opened goes on, and what it has closed is over."""
    if not reading.thinks:
        return Thinking.NONE
    parser = reading.parser()
    if parser.is_thinking:
        return Thinking.OPENED
    return Thinking.NONE if parser.has_thought else Thinking.OPTIONAL
