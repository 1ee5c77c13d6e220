"""`pdserve chat` against a router that streams what it is told to."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.__main__ import main
from pdserve.cli.chat import one_shot_question, printable
from pdserve.cli.chat_client import Answer
from tests.unit.cli.fake_router import FakeRouter, running

MODELS = {"/v1/models": (200, {"object": "list", "data": [{"id": "tiny"}]})}
DEADLINE_S = 20.0


class Terminal(io.StringIO):
    """Standard input of a person who typed nothing yet."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())


def test_one_question_is_answered_and_asked_as_the_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS)) as router:
        flags = ["--system", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--seed", "3"]
        assert main(["chat", "Hello?", "--base-url", router.base_url, *flags]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert router.bodies == [
        {
            "model": "tiny",
            "temperature": 0.0,
            "max_tokens": 9,
            "seed": 3,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_a_given_model_is_not_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter()) as router:
        assert main(["chat", "Hello?", "--model", "mine", "--base-url", router.base_url]) == 0
    assert router.bodies[0]["model"] == "mine"


def test_what_is_piped_in_follows_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long text\n"))
    with running(FakeRouter(MODELS)) as router:
        assert main(["chat", "Summarise:", "--base-url", router.base_url]) == 0
    assert router.bodies[0]["messages"] == [{"role": "user", "content": "Summarise:\n\na long text"}]


def test_an_empty_pipe_without_a_question_is_an_error() -> None:
    assert one_shot_question("Hello?", "") == "Hello?"
    assert one_shot_question(None, None) is None
    with pytest.raises(SetupError, match="no question"):
        one_shot_question(None, " \n")


def test_stats_tell_ttft_speed_and_how_to_look_closer(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS)) as router:
        assert main(["chat", "Hello?", "--stats", "--base-url", router.base_url]) == 0
    stats = capsys.readouterr().err
    assert re.fullmatch(r"\[TTFT \d+ ms   2 tokens(   [\d.]+ tokens/s)?   pdserve trace chatcmpl-1\]\n", stats)


def test_speed_counts_the_tokens_after_the_first() -> None:
    answer = Answer(started_at=1.0, first_at=1.5, last_at=2.5, completion_tokens=11)
    assert answer.describe() == "TTFT 500 ms   11 tokens   10.0 tokens/s"
    assert Answer().describe() == "no tokens"


def test_a_refusal_is_one_line_in_the_routers_words(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, refusal=(429, {"error": {"message": "Too busy."}}))) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 1
    assert capsys.readouterr().err == "error: Too busy.\n"


def test_an_error_within_the_stream_is_told_after_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=["Half", "ERROR Lost the worker."])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("Half")
    assert captured.err == "error: Lost the worker.\n"


def test_a_router_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hello?", "--model", "m", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: Cannot reach http://127.0.0.1:9")


def test_control_characters_are_not_printed_but_joined_emoji_are() -> None:
    assert printable("a\x1b]0;title\x07\x9b2Jb\n\tc") == "a]0;title2Jb\n\tc"
    family = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}"
    assert printable(family) == family


def test_ctrl_c_ends_a_single_answer_and_its_request() -> None:
    with running(FakeRouter(MODELS, pieces=["Once", "STALL"])) as router:
        command = [sys.executable, "-m", "pdserve.cli", "chat", "Hello?", "--base-url", router.base_url]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as chat:
            assert chat.stdout is not None
            assert chat.stdout.read(4) == b"Once"
            chat.send_signal(signal.SIGINT)
            assert chat.wait(DEADLINE_S) == 130
        assert router.disconnected.wait(DEADLINE_S)


def test_a_conversation_remembers_stops_on_ctrl_c_and_leaves_on_ctrl_d() -> None:
    ours, theirs = pty.openpty()
    with running(FakeRouter(MODELS)) as router:
        command = [sys.executable, "-m", "pdserve.cli", "chat", "--base-url", router.base_url]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as chat:
            os.close(theirs)
            read_until(ours, "> ")
            os.write(ours, b"one\n")
            read_until(ours, "Hello")
            read_until(ours, "> ")
            router.pieces = ["Part", "STALL"]
            os.write(ours, b"two\n")
            read_until(ours, "Part")
            chat.send_signal(signal.SIGINT)
            read_until(ours, "> ")
            assert router.disconnected.wait(DEADLINE_S)
            router.pieces = ["End"]
            os.write(ours, b"three\n")
            read_until(ours, "End")
            read_until(ours, "> ")
            os.write(ours, b"\x04")
            assert chat.wait(DEADLINE_S) == 0
    os.close(ours)
    assert [message["content"] for message in router.bodies[-1]["messages"]] == [  # type: ignore[attr-defined]
        "one",
        "Hello",
        "two",
        "Part",
        "three",
    ]


def read_until(terminal: int, text: str) -> None:
    """Reads what a process wrote to its terminal up to `text`."""
    seen = b""
    deadline = time.monotonic() + DEADLINE_S
    while text.encode() not in seen:
        readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, seen
        seen += os.read(terminal, 1)
