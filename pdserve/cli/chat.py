"""`pdserve chat`: holds a conversation with a running cluster in the terminal, or asks one question."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.base.api_key import bearer
from pdserve.base.config import load, option, positional
from pdserve.base.errors import PdserveError, SetupError
from pdserve.cli.chat_client import Answer, Endpoint, Piece, first_model, stream_answer
from pdserve.cli.chat_messages import ChatMessage, ToolCall
from pdserve.cli.chat_view import AnswerView, printable, show_calls, show_thinking
from pdserve.cli.repetition import RepetitionDetector
from pdserve.cli.router_client import DEFAULT_BASE_URL, get, normal_base_url
from pdserve.cli.stop_signals import finished_before

_INTERRUPTED = 130
_SHOWN_UNIT_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Settings of `pdserve chat`."""

    prompt: str | None = positional(
        None, help="question to ask; without one, standard input, or on a terminal a conversation"
    )
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")
    api_key: str | None = option(None, help="API key; default: the variable PDSERVE_API_KEY", metavar="KEY")
    model: str | None = option(None, help="name of the model; default: the router's", metavar="NAME")
    system: str | None = option(None, help="instructions that precede the conversation", metavar="TEXT")
    tools: str | None = option(None, help="JSON file with the functions that the model may call", metavar="FILE")
    show_thinking: bool = option(False, help="show the thinking as it arrives; default: one line about it")
    temperature: float | None = option(None, help="sampling temperature, 0 for greedy; default: the model's", minimum=0)
    top_p: float | None = option(None, help="cumulative probability to sample from; default: the model's")
    max_tokens: int = option(1024, help="maximum length of an answer in tokens", metavar="N", minimum=1)
    stop_repetition: bool = option(True, help="stop an answer that keeps repeating itself")
    seed: int | None = option(None, help="seed of sampling; the same seed gives the same answer", metavar="N")
    stats: bool = option(False, help="show TTFT, tokens per second and the request id after each answer")

    def request(self, model: str) -> dict[str, object]:
        """Fields of the request body apart from the messages. Raises `SetupError` if the tools cannot be read."""
        fields = {
            "model": model,
            "tools": None if self.tools is None else read_tools(self.tools),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


def main(argv: Sequence[str]) -> int:
    """Asks the question given as argument or on standard input, else holds a conversation. Raises `PdserveError`."""
    config = load(ChatConfig, "chat", argv, description=__doc__)
    base_url = normal_base_url(config.base_url)
    question = one_shot_question(config.prompt, None if sys.stdin.isatty() else sys.stdin.read())
    model = config.model or first_model(get(base_url, "/v1/models", config.api_key))
    chat = Conversation(config, base_url, model)
    if question is not None:
        return 0 if chat.ask(question) else _INTERRUPTED
    print(
        f"{model} at {base_url}. Ctrl-C stops an answer, /thinking shows the thinking of the last one, "
        "/clear starts a new conversation, Ctrl-D quits."
    )
    return _converse(chat)


def one_shot_question(prompt: str | None, piped: str | None) -> str | None:
    """The question: the argument followed by the piped text, if any; None to hold a conversation.

    Raises `SetupError` when there is neither a question nor a terminal.
    """
    if piped is None:
        return prompt
    texts = [text for text in (prompt, piped.strip()) if text]
    if not texts:
        raise SetupError("There is no question: standard input is empty. Give one as argument or pipe it in.")
    return "\n\n".join(texts)


def read_tools(path: str) -> list[object]:
    """The list in a JSON file; what its items must be is for the API to say. Raises `SetupError`."""
    try:
        tools = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise SetupError(f"--tools: {path} cannot be read as JSON: {error}.") from error
    if not isinstance(tools, list):
        raise SetupError(f"--tools: {path} has no list. Give a list as in the field `tools` of the API.")
    return tools


class Conversation:
    """A conversation with one model: its messages so far, and asking for the next."""

    def __init__(self, config: ChatConfig, base_url: str, model: str) -> None:
        self._config = config
        self._base_url = base_url
        self._request = config.request(model)
        self._start = [ChatMessage(role="system", content=config.system)] if config.system else []
        self._messages = list(self._start)

    def clear(self) -> None:
        """Removes all messages except the system's instructions."""
        self._messages = list(self._start)

    @property
    def open_calls(self) -> Sequence[ToolCall]:
        """Calls of the last answer, whose results the model waits for."""
        return self._messages[-1].calls if self._messages else ()

    @property
    def last_thinking(self) -> str:
        """Thinking of the last answer."""
        return self._messages[-1].thinking if self._messages else ""

    def ask(self, question: str) -> bool:
        """Streams the answer to standard output; False when Ctrl-C stopped it. The text up to then is kept.

        Calls that are still open are left out of the conversation: the API takes none without their results.
        Raises `PdserveError`; the question is then not part of the conversation.
        """
        if self.open_calls:
            self._messages[-1] = replace(self._messages[-1], calls=())
        return self._continue([ChatMessage(role="user", content=question)])

    def give_results(self, results: Sequence[str]) -> bool:
        """Streams what the model answers to the results of all open calls, as `ask` does."""
        calls = zip(self.open_calls, results, strict=True)
        return self._continue([ChatMessage(role="tool", content=text, tool_call_id=call.id) for call, text in calls])

    def _continue(self, added: Sequence[ChatMessage]) -> bool:
        answer = Answer()
        messages = [*self._messages, *added]
        finished = False
        with contextlib.suppress(KeyboardInterrupt):  # It arrived before the loop listened for it.
            finished = asyncio.run(self._stream(messages, answer))
        show_calls(answer.calls.values())
        # A call that was cut has no result, and what was stopped is not continued.
        calls = [call for call in answer.calls.values() if finished and call.is_complete]
        self._messages = [
            *messages,
            ChatMessage(role="assistant", content=answer.text, thinking=answer.thinking, calls=calls),
        ]
        if (notice := cut_notice(answer, self._config.max_tokens)) is not None:
            print(f"[{notice}]", file=sys.stderr)
        if self._config.stats:
            print(f"[{answer.describe()}]", file=sys.stderr)
        return finished

    async def _stream(self, messages: Sequence[ChatMessage], answer: Answer) -> bool:
        """Prints the answer; False when Ctrl-C came first.

        The loop itself handles the signal: `asyncio.run` alone loses one that arrives just before it waits. A second
        Ctrl-C interrupts code that does not stop.
        """
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            stopped.set()

        loop.add_signal_handler(signal.SIGINT, stop)
        return await finished_before(stopped, self._print(messages, answer))

    async def _print(self, messages: Sequence[ChatMessage], answer: Answer) -> None:
        detector = RepetitionDetector() if self._config.stop_repetition else None
        async with contextlib.aclosing(self._pieces(messages, answer)) as pieces:
            with AnswerView(shows_thinking=self._config.show_thinking) as view:
                async for piece in pieces:
                    view.show(piece)
                    if detector is not None:
                        answer.repetition = detector.feed(piece.thinking + piece.text)
                        if answer.repetition is not None:
                            return  # Closes the stream, which cancels the request.

    def _pieces(self, messages: Sequence[ChatMessage], answer: Answer) -> AsyncGenerator[Piece, None]:
        headers = bearer(self._config.api_key)
        return stream_answer(Endpoint(base_url=self._base_url, headers=headers), self._request, messages, answer)


def cut_notice(answer: Answer, max_tokens: int) -> str | None:
    """Why the answer is incomplete, and the flag that lets it go on; None for a complete answer."""
    if answer.repetition is not None:
        unit = printable(answer.repetition.unit).strip(" ,;:")
        shown = unit if len(unit) <= _SHOWN_UNIT_CHARS else f"{unit[:_SHOWN_UNIT_CHARS]}..."
        return (
            f"The answer was stopped: it repeats {shown!r} ({answer.repetition.count} times). "
            "Use --no-stop-repetition to let it go on."
        )
    if answer.finish_reason != "length":
        return None
    if answer.completion_tokens is not None and answer.completion_tokens < max_tokens:
        return f"The answer was cut at {answer.completion_tokens} tokens: the model's context is full."
    return f"The answer was cut at {max_tokens} tokens. Use --max-tokens for a higher limit."


def _converse(chat: Conversation) -> int:
    """Reads questions and prints answers until Ctrl-D."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing and history
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            continue
        if question == "/clear":
            chat.clear()
        elif question == "/thinking":
            show_thinking(chat.last_thinking)
        elif question:
            try:
                chat.ask(question)
                while chat.open_calls and (results := _read_results(chat.open_calls)) is not None:
                    chat.give_results(results)
            except PdserveError as error:
                print(f"error: {error}", file=sys.stderr)


def _read_results(calls: Sequence[ToolCall]) -> list[str] | None:
    """The result of each call, as the user enters it; None after Ctrl-C or Ctrl-D."""
    try:
        return [input(f"Result of {printable(call.name)}: ") for call in calls]
    except (EOFError, KeyboardInterrupt):
        print()
        return None
