"""From the blocks of a conversation to the messages that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdserve.base.errors import RequestError
from router_svc.api.anthropic.blocks import (
    AssistantMessage,
    Message,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.messages import MAX_CALLS, ChatMessage
from router_svc.api.openai.tools import CalledFunction, ToolCall

#: Ids of calls start with this, which is not shown to the model: some templates want ids of nine characters.
CALL_PREFIX = "toolu_"
#: Claude Code's first line, which is another one in each request: with it, no two prompts would share a prefix.
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")

_Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class _Turn:
    """One message for the template, from one or several of the client's."""

    role: _Role
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    result_of: str | None = None

    def message(self) -> ChatMessage:
        """The message."""
        return ChatMessage.model_construct(
            role=self.role,
            content="\n".join(self.texts) if self.texts or self.role != "assistant" else None,
            tool_calls=self.calls or None,
            tool_call_id=self.result_of,
            reasoning="\n".join(self.thoughts) or None,
        )


def chat_messages(system: Sequence[TextBlock], messages: Sequence[Message]) -> list[ChatMessage]:
    """The messages of a chat. Neighbours of one role are one message, since many templates want turns to alternate.

    Raises `RequestError` for a conversation that ends with a call, or with more calls in a message than there may be.
    """
    turns: list[_Turn] = []
    _add(turns, "system", _system_texts(system))
    for message in messages:
        match message:
            case SystemMessage():
                # Behind the first turn it is text of the user: many templates take a system message at the start only.
                is_first = all(turn.role == "system" for turn in turns)
                _add(turns, "system" if is_first else "user", _system_texts(message.content))
            case UserMessage():
                _add_user(turns, message)
            case AssistantMessage():
                _add_assistant(turns, message)
    _check(turns)
    return [turn.message() for turn in turns]


def continues(messages: Sequence[Message]) -> bool:
    """Whether the answer goes on with the last message."""
    return isinstance(messages[-1], AssistantMessage)


def _system_texts(blocks: Sequence[TextBlock]) -> list[str]:
    texts = [_BILLING_LINE.sub("", block.text, count=1) if _is_billed(block) else block.text for block in blocks]
    return [text for text in texts if text]


def _is_billed(block: TextBlock) -> bool:
    return _BILLING_LINE.match(block.text) is not None


def _add(turns: list[_Turn], role: _Role, texts: Sequence[str]) -> None:
    if texts:
        _turn(turns, role).texts.extend(texts)


def _turn(turns: list[_Turn], role: _Role) -> _Turn:
    """The last turn if it has this role, else a new one."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    return turns[-1]


def _add_user(turns: list[_Turn], message: UserMessage) -> None:
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            text = "\n".join(each.text for each in block.content or ())
            # Templates can show an error in no other way.
            shown = f"Error: {text}" if block.is_error else text
            turns.append(_Turn("tool", [shown], result_of=block.tool_use_id.removeprefix(CALL_PREFIX)))
        else:
            _turn(turns, "user").texts.append(block.text)
    if not message.content:
        _turn(turns, "user")


def _add_assistant(turns: list[_Turn], message: AssistantMessage) -> None:
    turn = _turn(turns, "assistant")
    for block in message.content:
        match block:
            case TextBlock(text=text):
                turn.texts.append(text)
            case ThinkingBlock(thinking=thinking) if thinking:
                turn.thoughts.append(thinking)
            case ToolUseBlock():
                turn.calls.append(_call(block))


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = to_json(block.input).decode()
    return ToolCall.model_construct(
        id=block.id.removeprefix(CALL_PREFIX),
        type="function",
        function=CalledFunction.model_construct(name=block.name, arguments=arguments),
    )


def _check(turns: Sequence[_Turn]) -> None:
    if any(len(turn.calls) > MAX_CALLS for turn in turns):
        raise RequestError(
            f"A message has more than {MAX_CALLS} blocks of type tool_use. Send fewer.", param="messages"
        )
    if not turns:
        raise RequestError("`messages` have no text. Send at least one message with content.", param="messages")
    last = turns[-1]
    if last.role == "assistant" and last.calls:
        raise RequestError("`messages` end with a tool_use block. Add a tool_result for it.", param="messages")
    if last.role == "assistant" and not any(text.strip() for text in last.texts):
        raise RequestError(
            "The last of `messages` is the assistant's and has no text to go on with. Add text, or a message of the "
            "user.",
            param="messages",
        )
