"""`pdserve bench serve` as a user runs it, against a fake server."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.__main__ import main
from pdserve.cli.bench.config import ServeConfig
from pdserve.cli.bench.words import WORDS
from tests.unit.cli.bench.fake_server import Body, FakeServer, running

SMALL = ("--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "3")


def _tokenize(body: Body) -> tuple[int, object]:
    """One id per word, in the format of vLLM and pdserve."""
    return 200, {"tokens": [1000 + index for index, _ in enumerate(str(body["prompt"]).split())]}


def _bench(server: FakeServer, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", server.base_url, *flags])


def _saved(server: FakeServer, path: Path, *flags: str) -> Any:
    where = ("--save-result", "--result-dir", str(path), "--result-filename", "r.json")
    assert _bench(server, *SMALL, *where, *flags) == 0
    return json.loads((path / "r.json").read_text())


def test_a_run_prints_the_table_and_sends_token_ids_of_exact_length(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(tokenize=_tokenize)) as server:
        assert _bench(server, *SMALL, "--ignore-eos", "--goodput", "ttft:60000", "tpot:60000") == 0
    out = capsys.readouterr().out
    assert "Successful requests:                     4" in out
    assert "Total input tokens:                      24" in out
    assert "Total generated tokens:                  12" in out
    assert "Request goodput (req/s):" in out
    assert {body["ignore_eos"] for body in server.bodies} == {True}
    assert {body["temperature"] for body in server.bodies} == {0.0}
    assert {len(body["prompt"]) for body in server.bodies} == {6}  # type: ignore[arg-type]
    assert {body["model"] for body in server.bodies} == {"tiny"}


def test_a_file_with_too_few_conversations_is_used_again_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, answer = "Who has built the first lighthouse\u2028of all", "Nobody knows that for sure today"
    turns = [{"from": who, "value": text} for who, text in (("human", question), ("gpt", answer))]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": turns}, {"id": "empty"}], ensure_ascii=False), encoding="utf-8-sig")
    with running(FakeServer(tokenize=_tokenize)) as server:
        file = ("--dataset-name", "sharegpt", "--dataset-path", str(path))
        assert _bench(server, *file, "--num-prompts", "3") == 0
        assert [body["prompt"] for body in server.bodies] == [question] * 3
        shown = capsys.readouterr()
        assert "Successful requests:                     3" in shown.out
        assert "only 1 usable requests, and 3 were ordered: they are sent several times" in shown.err
        assert _bench(server, *file, "--num-prompts", "1") == 0
    assert "usable" not in capsys.readouterr().err


def test_host_and_port_can_name_the_server() -> None:
    with running(FakeServer()) as server:
        assert main(["bench", "serve", *SMALL, "--host", "localhost", "--port", str(server.port)]) == 0
    assert len(server.bodies) == 4


def test_a_seed_sends_the_same_prompts_again() -> None:
    def prompts(seed: str) -> list[str]:
        with running(FakeServer(tokenize=_tokenize)) as server:
            _bench(server, *SMALL, "--seed", seed)
        return sorted(str(body["prompt"]) for body in server.bodies)

    assert prompts("1") == prompts("1") != prompts("2")


def test_the_tokenize_format_of_llama_cpp_is_supported() -> None:
    def tokenize(body: Body) -> tuple[int, object]:
        return 200, {"tokens": list(range(len(str(body.get("content", "")).split())))}

    with running(FakeServer(tokenize=tokenize)) as server:
        assert _bench(server, *SMALL) == 0
    assert {type(body["prompt"]) for body in server.bodies} == {list}


def test_without_tokenize_prompts_are_words_and_a_notice_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        assert _bench(server, *SMALL) == 0
    assert "--tokenizer DIR" in capsys.readouterr().err
    for body in server.bodies:
        words = str(body["prompt"]).split()
        assert len(words) == 6
        assert set(words) <= set(WORDS)


def test_the_result_contains_settings_client_and_server_version(tmp_path: Path) -> None:
    with running(FakeServer(tokenize=_tokenize)) as server:
        result = _saved(server, tmp_path, "--metric-percentiles", "95", "--header", '{"Authorization": "secret"}')
    assert (result["completed"], result["total_output_tokens"], result["model_id"]) == (4, 12, "tiny")
    assert result["request_rate"] == "inf"
    assert "p95_ttft_ms" in result
    assert "p99_ttft_ms" not in result
    assert result["server_version"] == "7"
    assert result["client"]["cores"] >= 1
    assert result["flags"]["random_input_len"] == 6
    assert "secret" not in json.dumps(result)
    assert "generated_texts" not in result


def test_details_are_written_on_request(tmp_path: Path) -> None:
    with running(FakeServer(tokenize=_tokenize)) as server:
        result = _saved(server, tmp_path, "--save-detailed")
    assert result["generated_texts"] == ["xxx"] * 4
    assert result["input_lens"] == [6] * 4
    assert [len(itls) for itls in result["itls"]] == [2] * 4


def test_each_rate_is_a_run_with_its_own_prompts(tmp_path: Path) -> None:
    picture = tmp_path / "p" / "latency.png"
    rates = ("--request-rate", "200", "400", "--plot", str(picture))
    with running(FakeServer(tokenize=_tokenize)) as server:
        result = _saved(server, tmp_path, *rates)
    assert [run["request_rate"] for run in result["runs"]] == [200, 400]
    assert [run["completed"] for run in result["runs"]] == [4, 4]
    assert len({str(body["prompt"]) for body in server.bodies}) == 8
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with running(FakeServer()) as server:
        assert _bench(server, *SMALL, "--request-rate", "1,2", "--plot", "x.png") == 1
    assert "pdserve[bench]" in capsys.readouterr().err
    assert server.bodies == []


def test_warm_ups_are_sent_before_and_not_counted(tmp_path: Path) -> None:
    with running(FakeServer(tokenize=_tokenize)) as server:
        result = _saved(server, tmp_path, "--num-warmups", "2")
    assert (result["num_prompts"], result["completed"]) == (4, 4)
    prompts = [str(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 6


def test_a_failing_warm_up_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(reply=lambda _: (400, {"error": {"message": "no such field"}}))) as server:
        assert _bench(server, *SMALL, "--num-warmups", "1") == 1
    assert "HTTP 400: no such field" in capsys.readouterr().err
    assert len(server.bodies) == 1


def test_a_run_without_a_completed_request_reports_why_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(reply=lambda _: (429, {"error": {"message": "queue full"}}))) as server:
        assert _bench(server, *SMALL) == 1
    captured = capsys.readouterr()
    assert "  HTTP 429:                              4" in captured.out
    assert "queue full" in captured.err


def test_failures_are_counted_and_the_other_requests_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([(429, {}), (429, {})])
    server = FakeServer()
    default_reply = server.reply
    server.reply = lambda body: next(answers, None) or default_reply(body)
    with running(server):
        assert _bench(server, *SMALL, "--max-concurrency", "1") == 0
    out = capsys.readouterr().out
    assert "Successful requests:                     2" in out
    assert "  HTTP 429:                              2" in out


def test_a_server_without_usage_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    default_reply = server.reply
    server.reply = lambda body: [piece for piece in default_reply(body) if b"usage" not in piece]  # type: ignore[operator]
    with running(server):
        assert _bench(server, *SMALL) == 0
    assert "no usage" in capsys.readouterr().err


def test_an_unknown_model_is_reported_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer()) as server:
        assert _bench(server, *SMALL, "--model", "huge") == 1
    error = capsys.readouterr().err
    assert "huge" in error
    assert "tiny" in error


def test_a_server_that_lists_no_models_gets_the_given_one() -> None:
    with running(FakeServer(pages={})) as server:
        assert _bench(server, *SMALL, "--model", "mine") == 0
    assert server.bodies[0]["model"] == "mine"


def test_an_unreachable_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert main(["bench", "serve", "--port", str(unused.getsockname()[1])]) == 1
    assert "Cannot reach" in capsys.readouterr().err


def test_a_chat_sends_text() -> None:
    with running(FakeServer(tokenize=_tokenize)) as server:
        _bench(server, *SMALL, "--endpoint", "/v1/chat/completions")
    [message] = server.bodies[0]["messages"]  # type: ignore[misc]
    assert len(message["content"].split()) == 6


def test_extra_fields_are_in_every_request() -> None:
    with running(FakeServer()) as server:
        assert _bench(server, *SMALL, "--extra-body", '{"min_tokens": 3, "temperature": 1}') == 0
    assert {(body["min_tokens"], body["temperature"]) for body in server.bodies} == {(3, 1)}


def test_a_shared_prefix_is_in_every_prompt() -> None:
    lens = ("--prefix-repetition-prefix-len", "8", "--prefix-repetition-suffix-len", "2")
    counts = ("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "1", "--num-prompts", "6")
    with running(FakeServer(tokenize=_tokenize)) as server:
        assert _bench(server, "--dataset-name", "shared-prefix", *lens, *counts) == 0
    prompts: list[Any] = [body["prompt"] for body in server.bodies]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 2


def test_a_trace_is_replayed_with_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": i, "input_length": 4 + i, "output_length": 1 + i, "hash_ids": [1, i + 2]} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--dataset-name", "trace", "--dataset-path", str(path), "--timed-trace-chunk-hash-size", "3")
    with running(FakeServer(tokenize=_tokenize)) as server:
        assert _bench(server, *flags) == 0
    bodies = sorted(server.bodies, key=lambda body: body["max_tokens"])  # type: ignore[arg-type, return-value]
    prompts: list[Any] = [body["prompt"] for body in bodies]
    assert [(len(prompt), body["max_tokens"]) for prompt, body in zip(prompts, bodies, strict=True)] == [
        (4, 1),
        (5, 2),
        (6, 3),
    ]
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1


def test_conversations_are_sent_as_text_and_a_file_without_any_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    turns = [{"value": "what is the answer"}, {"value": "it is forty two"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    flags = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "1")
    with running(FakeServer(tokenize=_tokenize)) as server:
        assert _bench(server, *flags) == 0
        assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("what is the answer", 4)]
        path.write_text("[]")
        assert _bench(server, *flags) == 1
    assert "no conversation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "needle"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "fast"], "'fast' is not a number"),
        (["--burstiness", "0"], "--burstiness"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--percentile-metrics", "ttft,speed"], "speed is not one of"),
        (["--goodput", "itl:5"], "itl is not one of"),
        (["--goodput", "ttft"], "not a number"),
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--dataset-path", "x"], "--dataset-path"),
        (["--plot", "x.png"], "several finite rates"),
        (["--save-detailed"], "--save-result"),
        (["--plot", "x.png", "--request-rate", "1", "inf"], "several finite rates"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"], "--ramp-up-end-rps"),
        (
            [
                "--ramp-up-strategy",
                "linear",
                "--ramp-up-start-rps",
                "1",
                "--ramp-up-end-rps",
                "2",
                "--request-rate",
                "3",
            ],
            "exclude each other",
        ),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--base-url", "ftp://x"], "not an address"),
    ],
)
def test_a_wrong_setting_is_named_in_the_error(
    flags: list[str], needle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 1
    assert needle in capsys.readouterr().err


def test_an_unknown_benchmark_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "everything"]) == 2
    assert "serve" in capsys.readouterr().err


def test_a_local_tokenizer_is_preferred_and_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(tokenize=_tokenize)) as server:
        assert _bench(server, *SMALL, "--tokenizer", str(tmp_path)) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert server.bodies == []


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "::1", "port": 9}, "http://[::1]:9"),
        ({"base_url": "10.0.0.7:80/v1", "port": 9}, "http://10.0.0.7:80"),
    ],
)
def test_the_address_comes_from_base_url_or_host_and_port(flags: dict[str, Any], url: str) -> None:
    assert ServeConfig(**flags).server_url == url


def test_a_server_that_is_not_openai_compatible_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(pages={"/v1/models": (200, b"<html>")})) as server:
        assert _bench(server, *SMALL) == 1
    assert "sent an unexpected answer" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_but_not_in_a_pipe() -> None:
    def shown(stderr: int) -> str:
        command = [sys.executable, "-m", "pdserve.cli", "bench", "serve", "--base-url", server.base_url, *SMALL]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, check=True, timeout=60)
        return (done.stderr or b"").decode()

    ours, theirs = pty.openpty()
    try:
        with running(FakeServer(tokenize=_tokenize)) as server:
            shown(theirs)
            piped = shown(subprocess.PIPE)
        assert b"4/4" in os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert piped == ""
