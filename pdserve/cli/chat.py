"""`pdserve chat`: talks to a running cluster in the terminal, or answers one question."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.config import load, option
from pdserve.base.errors import PdserveError, SetupError
from pdserve.cli.chat_client import Answer, Message, first_model, stream_answer
from pdserve.cli.router_client import DEFAULT_BASE_URL, get, normal_base_url
from pdserve.cli.stop_signals import finished_before

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """What `pdserve chat` needs to know."""

    prompt: str | None = option(
        None, help="a question to answer; without it and with a terminal, a conversation", positional=True
    )
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")
    model: str | None = option(None, help="model to ask; the router's when absent", metavar="NAME")
    system: str | None = option(None, help="instructions put before the conversation", metavar="TEXT")
    temperature: float | None = option(None, help="0 is greedy; the model's own when absent", minimum=0)
    top_p: float | None = option(None, help="share of probability to sample from; the model's own when absent")
    max_tokens: int | None = option(None, help="longest answer in tokens", metavar="N", minimum=1)
    seed: int | None = option(None, help="the same seed gives the same answer", metavar="N")
    stats: bool = option(False, help="show TTFT and tokens per second after each answer")

    def request(self, model: str) -> dict[str, object]:
        """The request body without its messages."""
        fields = {
            "model": model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


def main(argv: Sequence[str]) -> int:
    """Answers the question given as argument or on standard input, else holds a conversation."""
    config = load(ChatConfig, "chat", argv, description=__doc__)
    base_url = normal_base_url(config.base_url)
    question = one_shot_question(config.prompt, None if sys.stdin.isatty() else sys.stdin.read())
    request = config.request(config.model or first_model(get(base_url, "/v1/models")))
    chat = Conversation(base_url=base_url, request=request, system=config.system, stats=config.stats)
    if question is not None:
        return 0 if chat.ask(question) else _INTERRUPTED
    print(f"{request['model']} at {base_url}. Ctrl-C stops an answer, /clear starts anew, Ctrl-D leaves.")
    return _converse(chat)


def one_shot_question(prompt: str | None, piped: str | None) -> str | None:
    """The question from the argument and what was piped in, which follows it; None to hold a conversation.

    Raises `SetupError` when there is neither a question nor a terminal.
    """
    if piped is None:
        return prompt
    parts = [part for part in (prompt, piped.strip()) if part]
    if not parts:
        raise SetupError("There is no question: standard input is empty.")
    return "\n\n".join(parts)


class Conversation:
    """What has been said, and the way to say more."""

    def __init__(self, *, base_url: str, request: Mapping[str, object], system: str | None, stats: bool) -> None:
        self._base_url = base_url
        self._request = request
        self._start = [Message(role="system", content=system)] if system else []
        self._messages = list(self._start)
        self._stats = stats

    def clear(self) -> None:
        """Forgets everything but the system's instructions."""
        self._messages = list(self._start)

    def ask(self, question: str) -> bool:
        """Streams the answer to standard output; False when Ctrl-C stopped it. What had come by then stays said.

        Raises `PdserveError`; the question then counts as not asked.
        """
        answer = Answer()
        messages = [*self._messages, Message(role="user", content=question)]
        finished = False
        with contextlib.suppress(KeyboardInterrupt):  # one that came before the loop listened for it
            finished = asyncio.run(self._stream(messages, answer))
        print(flush=True)
        self._messages = [*messages, Message(role="assistant", content=answer.text)]
        if self._stats:
            print(f"[{answer.describe()}]", file=sys.stderr)
        return finished

    async def _stream(self, messages: Sequence[Message], answer: Answer) -> bool:
        """Prints the answer; False when Ctrl-C came first.

        The loop itself listens for the signal: `asyncio.run` alone loses one that arrives just before it falls asleep.
        A second one interrupts whatever does not stop.
        """
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            stopped.set()

        loop.add_signal_handler(signal.SIGINT, stop)
        return await finished_before(stopped, self._print(messages, answer))

    async def _print(self, messages: Sequence[Message], answer: Answer) -> None:
        async with contextlib.aclosing(stream_answer(self._base_url, self._request, messages, answer)) as pieces:
            async for text in pieces:
                sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()


def printable(text: str) -> str:
    """Without control characters: a model's words must not move the cursor or rename the window."""
    return "".join(character for character in text if unicodedata.category(character) != "Cc" or character in "\n\t")


def _converse(chat: Conversation) -> int:
    """Question and answer until Ctrl-D."""
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
        elif question:
            try:
                chat.ask(question)
            except PdserveError as error:
                print(f"error: {error}", file=sys.stderr)
