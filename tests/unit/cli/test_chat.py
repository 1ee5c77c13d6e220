"""`pdserve chat` against a fake router that streams what a test wants."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.__main__ import main
from pdserve.cli.chat import cut_notice, one_shot_question
from pdserve.cli.chat_client import Answer
from pdserve.cli.chat_view import printable
from pdserve.cli.repetition import Repetition
from tests.support.deadline import DEADLINE_S
from tests.unit.cli.fake_router import FakeRouter, running

MODELS = {"/v1/models": (200, {"object": "list", "data": [{"id": "tiny"}]})}


class Terminal(io.StringIO):
    """Standard input of a user who has typed nothing yet."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())


def test_a_question_is_sent_with_the_settings_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_given_model_is_used_without_asking_for_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter()) as router:
        assert main(["chat", "Hello?", "--model", "mine", "--base-url", router.base_url]) == 0
    assert router.bodies[0]["model"] == "mine"


def test_answers_are_bounded_unless_a_flag_says_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, finish_reason="length", completion_tokens=1024)) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 0
    assert router.bodies[0]["max_tokens"] == 1024
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert captured.err == "[The answer was cut at 1024 tokens. Use --max-tokens for a higher limit.]\n"


def test_where_the_context_is_shorter_than_the_bound_the_answer_may_fill_it(capsys: pytest.CaptureFixture[str]) -> None:
    too_long = (400, {"error": {"message": "The context holds 64.", "param": "max_tokens"}})
    with running(FakeRouter(MODELS, refusals=[too_long], finish_reason="length", completion_tokens=60)) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 0
    first, second = router.bodies
    assert first == second | {"max_tokens": 1024}
    assert capsys.readouterr().err == "[The answer was cut at 60 tokens: the model's context is full.]\n"


def test_other_refusals_are_not_retried(capsys: pytest.CaptureFixture[str]) -> None:
    too_long = (400, {"error": {"message": "The prompt is too long.", "param": "messages"}})
    with running(FakeRouter(MODELS, refusals=[too_long])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 1
    assert len(router.bodies) == 1
    assert capsys.readouterr().err == "error: The prompt is too long.\n"


def test_an_answer_that_repeats_itself_is_stopped_and_its_request_cancelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = ["I know: ", *["il Coriobella, "] * 100, "STALL"]
    with running(FakeRouter(MODELS, pieces=pieces)) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 0
        assert router.disconnected.wait(DEADLINE_S)
    captured = capsys.readouterr()
    count = captured.out.count("il Coriobella, ")
    assert 4 <= count < 100
    assert captured.err == (
        f"[The answer was stopped: it repeats 'il Coriobella' ({count} times). "
        "Use --no-stop-repetition to let it go on.]\n"
    )


def test_repetition_is_let_through_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=["il Coriobella, "] * 100)) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url, "--no-stop-repetition"]) == 0
    assert capsys.readouterr() == ("il Coriobella, " * 100 + "\n", "")


def test_a_long_repeated_text_is_shortened_in_the_notice() -> None:
    answer = Answer(repetition=Repetition(unit=" Once upon\x1b a time" * 10, count=4))
    assert cut_notice(answer, 10) == (
        "The answer was stopped: it repeats 'Once upon a time Once upon a time Once upon a time Once upon...' "
        "(4 times). Use --no-stop-repetition to let it go on."
    )


def test_piped_text_follows_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long text\n"))
    with running(FakeRouter(MODELS)) as router:
        assert main(["chat", "Summarise:", "--base-url", router.base_url]) == 0
    assert router.bodies[0]["messages"] == [{"role": "user", "content": "Summarise:\n\na long text"}]


def test_an_empty_pipe_without_a_question_is_an_error() -> None:
    assert one_shot_question("Hello?", "") == "Hello?"
    assert one_shot_question(None, None) is None
    with pytest.raises(SetupError, match="no question"):
        one_shot_question(None, " \n")


def test_stats_show_ttft_speed_and_the_trace_command(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS)) as router:
        assert main(["chat", "Hello?", "--stats", "--base-url", router.base_url]) == 0
    stats = capsys.readouterr().err
    assert re.fullmatch(r"\[TTFT \d+ ms   2 tokens(   [\d.]+ tokens/s)?   pdserve trace chatcmpl-1\]\n", stats)


def test_speed_is_measured_after_the_first_token() -> None:
    answer = Answer(started_at=1.0, first_at=1.5, last_at=2.5, completion_tokens=11)
    assert answer.describe() == "TTFT 500 ms   11 tokens   10.0 tokens/s"
    assert Answer().describe() == "no tokens"


def test_a_refusal_is_shown_as_one_line_with_the_routers_message(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, refusals=[(429, {"error": {"message": "Too busy."}})])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 1
    assert capsys.readouterr().err == "error: Too busy.\n"


def test_an_error_in_the_stream_is_shown_after_the_text_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=["Half", "ERROR Lost the worker."])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("Half")
    assert captured.err == "error: Lost the worker.\n"


def test_an_unreachable_router_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hello?", "--model", "m", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: Cannot reach http://127.0.0.1:9")


def test_control_characters_are_removed_but_joined_emoji_are_kept() -> None:
    assert printable("a\x1b]0;title\x07\x9b2Jb\n\tc") == "a]0;title2Jb\n\tc"
    family = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}"
    assert printable(family) == family


def test_ctrl_c_stops_an_answer_and_cancels_its_request() -> None:
    with running(FakeRouter(MODELS, pieces=["Once", "STALL"])) as router:
        command = [sys.executable, "-m", "pdserve.cli", "chat", "Hello?", "--base-url", router.base_url]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as chat:
            assert chat.stdout is not None
            assert chat.stdout.read(4) == b"Once"
            chat.send_signal(signal.SIGINT)
            assert chat.wait(DEADLINE_S) == 130
        assert router.disconnected.wait(DEADLINE_S)


def test_a_conversation_keeps_its_messages_stops_answers_on_ctrl_c_and_ends_on_ctrl_d() -> None:
    with running(FakeRouter(MODELS)) as router, conversation(router) as (chat, ours):
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
    assert [message["content"] for message in sent(router)] == ["one", "Hello", "two", "Part", "three"]


def thinking(text: str) -> dict[str, object]:
    """A delta of thinking as the router sends it: under both names."""
    return {"reasoning": text, "reasoning_content": text}


def call(index: int, **fields: object) -> dict[str, object]:
    """A delta of one call."""
    return {"tool_calls": [{"index": index, **fields}]}


PARIS = [
    call(0, id="call-1", type="function", function={"name": "get_weather", "arguments": ""}),
    call(0, function={"arguments": '{"city": '}),
    call(0, function={"arguments": '"Paris"}'}),
]
ROME = call(1, id="call-2", type="function", function={"name": "get_weather", "arguments": '{"city": "Rome"}'})
CUT = call(1, id="call-2", type="function", function={"name": "get_weather", "arguments": '{"city'})
CALLED_PARIS = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}


def test_away_from_a_terminal_thinking_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=[thinking("Well."), "Hel", "lo"])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 0
    assert capsys.readouterr() == ("Hello\n", "")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_under_either_name_is_shown_on_request_and_not_as_the_answer(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeRouter(MODELS, pieces=[{name: "Well,\n"}, {name: " now."}, "Hello"])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url, "--show-thinking"]) == 0
    assert capsys.readouterr() == ("Hello\n", "Well,\n now.\n")


def test_thinking_that_is_sent_under_both_names_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=[thinking("One. "), thinking("Two."), "Hello"])) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url, "--show-thinking"]) == 0
    assert capsys.readouterr() == ("Hello\n", "One. Two.\n")


def test_an_answer_that_is_cut_in_its_thinking_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=[thinking("Well.")], finish_reason="length")) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url, "--max-tokens", "1"]) == 0
    assert capsys.readouterr() == (
        "",
        "[The answer was cut at 1 tokens. Use --max-tokens for a higher limit.]\n",
    )


def test_thinking_that_repeats_itself_is_stopped_like_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [*[thinking("But wait, no. ")] * 100, "STALL"]
    with running(FakeRouter(MODELS, pieces=pieces)) as router:
        assert main(["chat", "Hello?", "--base-url", router.base_url]) == 0
        assert router.disconnected.wait(DEADLINE_S)
    assert "The answer was stopped: it repeats 'But wait, no.'" in capsys.readouterr().err


def test_stats_count_from_the_first_token_of_thinking(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeRouter(MODELS, pieces=[thinking("Well.")])) as router:
        assert main(["chat", "Hello?", "--stats", "--base-url", router.base_url]) == 0
    assert "TTFT" in capsys.readouterr().err


def test_calls_of_the_given_tools_are_not_the_answer_but_shown_with_their_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    with running(FakeRouter(MODELS, pieces=["Let me see.", *PARIS, ROME], finish_reason="tool_calls")) as router:
        flags = ["--tools", str(tmp_path / "tools.json")]
        assert main(["chat", "Weather?", "--base-url", router.base_url, *flags]) == 0
    assert router.bodies[0]["tools"] == tools
    assert capsys.readouterr() == (
        "Let me see.\n",
        'get_weather({"city": "Paris"})\nget_weather({"city": "Rome"})\n',
    )


@pytest.mark.parametrize(
    ("content", "reason"), [("[", "cannot be read as JSON"), ("{}", "has no list"), (None, "No such file")]
)
def test_tools_that_are_no_list_are_an_error(
    content: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    with running(FakeRouter(MODELS)) as router:
        assert main(["chat", "Weather?", "--base-url", router.base_url, "--tools", str(path)]) == 1
    assert reason in capsys.readouterr().err
    assert router.bodies == []


def test_on_a_terminal_thinking_is_folded_and_kept_until_it_is_wanted() -> None:
    with running(FakeRouter(MODELS)) as router, conversation(router) as (chat, ours):
        os.write(ours, b"/thinking\n")
        read_until(ours, "The last answer has no thinking.")
        read_until(ours, "> ")
        router.pieces = [thinking("Deep "), thinking("\x1b]0;title\x07 thought."), "Hello"]
        os.write(ours, b"one\n")
        shown = read_until(ours, "Hello")
        assert re.search(r"Thinking: 5 characters.*Thought for [\d.]+ s: 24 characters.*\nHello", shown, re.DOTALL)
        assert "Deep" not in shown
        read_until(ours, "> ")
        os.write(ours, b"/thinking\n")
        read_until(ours, "Deep ]0;title thought.")
        read_until(ours, "> ")
        router.pieces = ["End"]
        os.write(ours, b"two\n")
        read_until(ours, "> ")
        os.write(ours, b"\x04")
        assert chat.wait(DEADLINE_S) == 0
    assert sent(router)[1] == {"role": "assistant", "content": "Hello", "reasoning": "Deep \x1b]0;title\x07 thought."}


def test_in_a_conversation_the_user_gives_the_results_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeRouter(MODELS, pieces=[thinking("Look."), *PARIS, ROME])) as router:
        prompts = converse(monkeypatch, router, "Weather?", "sunny", ["Sun and rain."], "rainy")
    assert prompts == ["\n> ", "Result of get_weather: ", "Result of get_weather: ", "\n> "]
    called_rome = CALLED_PARIS | {
        "id": "call-2",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    assert sent(router) == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning": "Look.", "tool_calls": [CALLED_PARIS, called_rome]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call-1"},
        {"role": "tool", "content": "rainy", "tool_call_id": "call-2"},
    ]


@pytest.mark.parametrize("interruption", [EOFError(), KeyboardInterrupt()])
def test_calls_that_get_no_results_are_left_out_of_the_conversation(
    interruption: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(FakeRouter(MODELS, pieces=["Let me see.", *PARIS])) as router:
        converse(monkeypatch, router, "Weather?", interruption, ["Fine."], "Forget it.")
    assert sent(router) == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "user", "content": "Forget it."},
    ]


def test_calls_whose_results_the_router_refuses_are_left_out_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeRouter(MODELS, pieces=[*PARIS])) as router:
        refusal = (429, {"error": {"message": "Too busy."}})
        converse(monkeypatch, router, "Weather?", refusal, "sunny", ["Fine."], "Forget it.")
    assert "error: Too busy." in capsys.readouterr().err
    assert sent(router)[1:] == [{"role": "assistant", "content": ""}, {"role": "user", "content": "Forget it."}]


def test_a_call_that_was_cut_is_shown_and_nothing_waits_for_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeRouter(MODELS, pieces=["Hm.", CUT], finish_reason="length")) as router:
        prompts = converse(monkeypatch, router, "Weather?", ["Fine."], "Again?")
    assert prompts == ["\n> "] * 3
    assert capsys.readouterr().err.startswith('get_weather({"city...\n')
    assert sent(router)[1] == {"role": "assistant", "content": "Hm."}


Refusal = tuple[int, object]


def converse(
    monkeypatch: pytest.MonkeyPatch, router: FakeRouter, *script: str | BaseException | list[str] | Refusal
) -> list[str]:
    """Holds a conversation in this process, up to Ctrl-D; returns what the user was prompted with.

    The script has what the user enters, and in between answers and refusals of the router from then on.
    """
    steps, prompts = iter(script), list[str]()

    def enter(prompt: str) -> str:
        prompts.append(prompt)
        for step in steps:
            match step:
                case str():
                    return step
                case BaseException():
                    raise step
                case list():
                    router.pieces = [*step]
                case _:
                    router.refusals = [step]
        raise EOFError

    monkeypatch.setattr("builtins.input", enter)
    assert main(["chat", "--base-url", router.base_url]) == 0
    return prompts


def sent(router: FakeRouter) -> list[dict[str, object]]:
    """The messages of the last request."""
    messages = router.bodies[-1]["messages"]
    assert isinstance(messages, list)
    return messages


@contextmanager
def conversation(router: FakeRouter) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A conversation that waits for its first question, and its terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pdserve.cli", "chat", "--base-url", router.base_url]
    try:
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as chat:
            os.close(theirs)
            try:
                read_until(ours, "> ")
                yield chat, ours
            except BaseException:
                chat.kill()
                raise
    finally:
        os.close(ours)


def read_until(terminal: int, text: str) -> str:
    """Reads the output of a process on its terminal up to `text`, and returns it."""
    seen = b""
    deadline = time.monotonic() + DEADLINE_S
    while text.encode() not in seen:
        readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, seen
        seen += os.read(terminal, 1)
    return seen.decode()
