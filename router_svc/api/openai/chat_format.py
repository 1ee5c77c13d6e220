"""The choices of chats: messages with text, thinking and calls, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pdserve.base.sampling import FinishReason, TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.json_pieces import integers_to_json, to_json
from router_svc.api.openai.answers import (
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageAnswer,
    Ending,
    FunctionAnswer,
    ToolCallAnswer,
    ToolCallDelta,
)
from router_svc.api.openai.chat_reading import ChatReading
from router_svc.api.openai.choices import CollectedChoice, ending
from router_svc.api.openai.logprobs import chat_logprobs, chat_logprobs_pieces
from router_svc.api.openai.prompt_logprobs import ScoredPrompt
from router_svc.api.openai.read_message import ReadMessage, call_id
from router_svc.messages.events import CallArguments, CallOpened, Event, Text, merged
from router_svc.request.output import ChoiceDelta

#: Tokens of a whole message that are read at once.
_TOKENS_AT_ONCE = 256


class ChatFormat:
    """Choices with a `message`, or a `delta` of one."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        response_id: str = "",
        reading: ChatReading | None = None,
        prompts: Sequence[Sequence[int]] = (),
        scored: ScoredPrompt | None = None,
    ) -> None:
        """`reading` None: messages are plain text. `response_id`: what the ids of calls are made of.

        `prompts`: the token ids of each choice's prompt, if the client requested token ids. `scored`: what is reported
        of the prompt's tokens; None: nothing.
        """
        self._scored = scored
        self._scores: Sequence[TokenLogprobs] = ()
        self._tokenizer = tokenizer
        self._response_id = response_id
        self._reading = reading
        self._prompts = prompts
        self._messages: dict[int, ReadMessage] = {}

    @property
    def counts_reasoning(self) -> bool:
        """Whether these messages may have thinking."""
        return self._reading is not None and self._reading.thinks

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking so far, in all choices."""
        return sum(message.reasoning_tokens for message in self._messages.values())

    def opening(self, index: int) -> ChatChunkChoice | None:
        """The role of the message."""
        delta: ChatDelta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def scored(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """Nothing: scores are not streamed in chats."""
        raise AssertionError("a chat with prompt_logprobs is not streamed")

    def shared_fields(self) -> Iterator[bytes]:
        """The tokens of the prompt and their log-probabilities, as the client requested: all choices have the same."""
        if self._scored is not None:
            yield b',"prompt_logprobs":'
            yield from self._scored.pieces(self._scores, self._tokenizer)
        if self._prompts:
            yield b',"prompt_token_ids":%b' % integers_to_json(self._prompts[0])

    def chunk(self, delta: ChoiceDelta) -> ChatChunkChoice | None:
        """What is new of the message; None: all of it is held back."""
        chunk = self._chunk(delta)
        if not self._prompts:
            return chunk
        chunk = chunk or {"index": delta.choice_index, "delta": {}, "logprobs": None, "finish_reason": None}
        chunk["token_ids"] = [*delta.token_ids]
        return chunk

    def _chunk(self, delta: ChoiceDelta) -> ChatChunkChoice | None:
        logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._tokenizer) if delta.logprobs else None
        if self._reading is None:
            content: ChatDelta = {"content": delta.text} if delta.text else {}
            return _chunk_choice(delta, content, logprobs, ending(delta))
        message, is_end = self._message(delta.choice_index), delta.finish_reason is not None
        pieces = delta.pieces or (delta.text,)
        content = self._delta(delta.choice_index, message.add(pieces, is_end=is_end, has_tokens=bool(delta.token_ids)))
        if not content and logprobs is None and delta.finish_reason is None:
            return None
        return _chunk_choice(delta, content, logprobs, self._ending(delta, message))

    def whole(self, index: int, collected: CollectedChoice) -> Iterator[bytes]:
        """The message."""
        self._scores = collected.prompt_logprobs
        message: ChatMessageAnswer = {"role": "assistant", "content": "".join(collected.text), "refusal": None}
        read: ReadMessage | None = None
        if self._reading is not None:
            read, events = self._message(index), list[Event]()
            for start in range(0, len(collected.text), _TOKENS_AT_ONCE):
                events += read.add(collected.text[start : start + _TOKENS_AT_ONCE], is_end=False)
                yield b""
            events += read.add((), is_end=True)
            message = self._whole_message(index, events)
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, to_json(message))
        if collected.logprobs:
            yield from chat_logprobs_pieces(collected.token_ids, collected.logprobs, self._tokenizer)
        else:
            yield b"null"
        if self._prompts:
            yield b',"token_ids":%b' % integers_to_json(collected.token_ids)
        yield b"," + to_json(self._ending(collected, read))[1:]

    def _message(self, index: int) -> ReadMessage:
        assert self._reading is not None
        if index not in self._messages:
            self._messages[index] = ReadMessage(self._reading)
        return self._messages[index]

    def _delta(self, index: int, events: Iterable[Event]) -> ChatDelta:
        delta: ChatDelta = {}
        texts, thoughts = _texts(events, self._shows_thinking)
        if texts:
            delta["content"] = texts
        if thoughts:
            delta["reasoning"] = delta["reasoning_content"] = thoughts
        calls = dict[int, ToolCallDelta]()
        for event in events:
            if isinstance(event, CallOpened):
                calls[event.index] = {
                    "index": event.index,
                    "id": self._call_id(index, event.index),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            elif isinstance(event, CallArguments):
                call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _whole_message(self, index: int, events: Sequence[Event]) -> ChatMessageAnswer:
        text, thoughts = _texts(events, self._shows_thinking)
        calls: list[ToolCallAnswer] = []
        for event in merged(events):
            if isinstance(event, CallOpened):
                function: FunctionAnswer = {"name": event.name, "arguments": ""}
                calls.append({"id": self._call_id(index, event.index), "type": "function", "function": function})
            elif isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
        is_text = bool(text) or not events
        message: ChatMessageAnswer = {"role": "assistant", "content": text if is_text else None, "refusal": None}
        if thoughts:
            message["reasoning"] = message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return message

    @property
    def _shows_thinking(self) -> bool:
        return self._reading is not None and self._reading.shows_thinking

    def _ending(self, choice: ChoiceDelta | CollectedChoice, message: ReadMessage | None) -> Ending:
        """As OpenAI's: whole calls are the reason of an end unless the client has named the function."""
        result, is_named = ending(choice), self._reading is not None and self._reading.is_named
        has_whole_calls = message is not None and message.calls > 0 and not message.has_cut_call
        if has_whole_calls and choice.finish_reason is FinishReason.STOP and not is_named:
            result["finish_reason"] = "tool_calls"
        return result

    def _call_id(self, choice: int, call: int) -> str:
        """Equal on any router that makes this response."""
        assert self._reading is not None
        return call_id(self._response_id, choice, call, characters=self._reading.form.id_characters)


def _chunk_choice(
    delta: ChoiceDelta, content: ChatDelta, logprobs: ChatLogprobs | None, ends: Ending
) -> ChatChunkChoice:
    return {
        "index": delta.choice_index,
        "delta": content,
        "logprobs": logprobs,
        "finish_reason": ends["finish_reason"],
        "stop_reason": ends["stop_reason"],
    }


def _texts(events: Iterable[Event], shows_thinking: bool) -> tuple[str, str]:
    texts = [event for event in events if isinstance(event, Text)]
    thoughts = "".join(event.text for event in texts if event.is_thinking) if shows_thinking else ""
    return "".join(event.text for event in texts if not event.is_thinking), thoughts
