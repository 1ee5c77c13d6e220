"""`pdserve run-batch` against a server that answers as a test wants."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.__main__ import main
from pdserve.cli.run_batch import run

COMPLETIONS = "/v1/completions"


@dataclass
class Server:
    """A server whose answers are its requests' prompts, but for the answers that it has in store for some."""

    #: Status, body and headers of the next answers to a prompt.
    answers: dict[str, list[tuple[int, Any, dict[str, str]]]] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    #: If not None: how many requests must be there before any is answered.
    together: threading.Barrier | None = None
    url: str = ""

    def answer(self, prompt: str) -> tuple[int, Any, dict[str, str]]:
        self.prompts.append(prompt)
        if self.together is not None:
            self.together.wait(timeout=20)
        waiting = self.answers.get(prompt)
        return waiting.pop(0) if waiting else (200, {"text": prompt}, {})


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer, headers = server.answer(body["prompt"])
            if status == 0:
                self.close_connection = True
                return
            data = json.dumps(answer, indent=1).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), "X-Request-Id": "r1", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def line(custom_id: str, **changes: object) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {"prompt": custom_id}}
    return json.dumps({**fields, **changes})


def batch(server: Server, directory: Path, lines: list[str], *flags: str) -> int:
    source = directory / "in.jsonl"
    source.write_text("\n".join(lines) + "\n")
    return main(["run-batch", "-i", str(source), "-o", str(directory / "out.jsonl"), "--base-url", server.url, *flags])


def results(directory: Path) -> dict[str, Any]:
    lines = [json.loads(each) for each in (directory / "out.jsonl").read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def test_every_request_has_a_result_in_the_form_of_openai(tmp_path: Path) -> None:
    with serving(Server()) as server:
        assert batch(server, tmp_path, [line("a"), "", line("Ünï")]) == 0
    found = results(tmp_path)
    assert found["a"].pop("id").startswith("batch_req_")
    assert found["a"] == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"text": "a"}},
        "error": None,
    }
    assert found["Ünï"]["response"]["body"] == {"text": "Ünï"}


def test_only_requests_without_a_result_are_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Server()) as server:
        assert batch(server, tmp_path, [line("a"), line("b")]) == 0
        out = tmp_path / "out.jsonl"
        first, second = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(first + second[:-10])
        done = json.loads(first)["custom_id"]
        server.prompts.clear()
        assert batch(server, tmp_path, [line("a"), line("b"), line("c")]) == 0
        assert sorted(server.prompts) == sorted({"a", "b", "c"} - {done})
    assert results(tmp_path).keys() == {"a", "b", "c"}
    assert out.read_bytes().startswith(first)
    assert "2 requests succeeded, 0 failed; 1 were done before" in capsys.readouterr().err


def test_a_refusal_is_the_result_of_its_request_alone(tmp_path: Path) -> None:
    refusal = (400, {"error": {"message": "too long"}}, {})
    with serving(Server(answers={"a": [refusal]})) as server:
        assert batch(server, tmp_path, [line("a"), line("b")]) == 1
    found = results(tmp_path)
    assert found["a"]["response"]["status_code"] == 400
    assert found["a"]["response"]["body"] == refusal[1]
    assert found["b"]["response"]["status_code"] == 200


def test_a_request_waits_for_an_overloaded_server_and_for_one_that_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_FIRST_PAUSE_S", 0.001)
    busy = (429, {"error": {"message": "busy"}}, {"Retry-After": "0"})
    with serving(Server(answers={"a": [busy, (0, None, {}), (503, {}, {"Retry-After": "0"})]})) as server:
        assert batch(server, tmp_path, [line("a")]) == 0
        assert server.prompts == ["a"] * 4
    assert results(tmp_path)["a"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {"error": {"message": "Unknown key."}}, {}), "Unknown key. Give a key with --api-key"),
        ((429, {"error": {"message": "Used up.", "code": "insufficient_quota"}}, {}), "Used up. Run the command again"),
        ((503, {"error": {"message": "Full."}}, {"Retry-After": "99"}), "Full. Run the command again"),
        ((0, None, {}), "Cannot reach"),
    ],
)
def test_what_all_requests_would_meet_ends_the_run(
    answer: tuple[int, Any, dict[str, str]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_FIRST_PAUSE_S", 0.001)
    with serving(Server(answers={"b": [answer] * 9})) as server:
        flags = ("--max-concurrency", "1", "--overload-timeout-s", "50")
        assert batch(server, tmp_path, [line("a"), line("b"), line("c")], *flags) == 1
        assert "c" not in server.prompts
    assert message in capsys.readouterr().err
    assert results(tmp_path).keys() == {"a"}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_requests_run_at_a_time_as_the_flag_says(concurrency: int, tmp_path: Path) -> None:
    barrier = threading.Barrier(concurrency)
    with serving(Server(together=barrier)) as server:
        names = [line(str(number)) for number in range(6)]
        assert batch(server, tmp_path, names, "--max-concurrency", str(concurrency)) == 0
    assert len(results(tmp_path)) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "line 2: It is not JSON"),
        (line("x", url="/v1/embeddings"), "line 2: url: '/v1/embeddings' is not one of"),
        (line("x", method="GET"), "line 2: method:"),
        (line("x", body={"stream": True}), "line 2: body.stream:"),
        (line("x", body={"background": True}), "line 2: body.background:"),
        (line("x", more=1), "line 2: more:"),
        (line(""), "line 2: custom_id:"),
        (line("a"), "line 2: custom_id 'a' is that of an earlier line"),
    ],
)
def test_nothing_is_sent_of_an_input_that_is_wrong(
    wrong: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Server()) as server:
        assert batch(server, tmp_path, [line("a"), wrong]) == 1
        assert server.prompts == []
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("content", ["notes\n", "notes", line("a") + "\n"])
def test_a_file_with_anything_else_is_never_written(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text(content)
    with serving(Server()) as server:
        assert batch(server, tmp_path, [line("a")]) == 1
        assert server.prompts == []
    assert "line 1: It is no result of a batch" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == content


def test_two_runs_do_not_write_one_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "out.jsonl").open("w") as other, serving(Server()) as server:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert batch(server, tmp_path, [line("a")]) == 1
        assert server.prompts == []
    assert "Another process writes" in capsys.readouterr().err
