"""Workloads from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.bench.dataset_files import (
    TraceLine,
    read_sharegpt,
    read_trace,
    sharegpt_requests,
    trace_arrivals_s,
    trace_requests,
)
from pdserve.cli.bench.datasets import TokenPool

POOL = TokenPool(tuple(range(1000)))


def _line(timestamp: float, input_length: int, hash_ids: list[int], output_length: int = 3) -> TraceLine:
    return TraceLine(timestamp=timestamp, input_length=input_length, output_length=output_length, hash_ids=hash_ids)


def _write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def _words(text: str) -> int:
    return len(text.split())


def test_a_trace_is_sorted_by_time_and_its_first_requests_are_kept(tmp_path: Path) -> None:
    rows = [
        {"timestamp": stamp, "input_length": 10, "output_length": 2, "hash_ids": [stamp], "session": "x"}
        for stamp in (3000, 1000, 2000)
    ]
    lines = read_trace(_write(tmp_path / "t.jsonl", rows[0], "", *rows[1:]), 2)
    assert [line.timestamp for line in lines] == [1000, 2000]
    assert trace_arrivals_s(lines, 0.001) == [0.0, 1.0]
    assert trace_arrivals_s(lines, 0.01) == [0.0, 10.0]


def test_equal_hashes_give_equal_tokens_wherever_they_occur() -> None:
    one, two, three = (
        request.prompt
        for request in trace_requests(
            POOL, [_line(0, 20, [7, 8]), _line(1, 24, [7, 9]), _line(2, 8, [8])], tokens_per_hash=8
        )
    )
    assert one[:8] == two[:8]
    assert one[8:16] == three
    assert one[8:16] != two[8:16]
    assert one[16:] != two[16:20]


@pytest.mark.parametrize(("length", "hashes"), [(5, [1]), (16, [1, 2]), (20, [1, 2]), (9, []), (3, [1, 2, 3])])
def test_prompts_have_the_lengths_of_the_trace(length: int, hashes: list[int]) -> None:
    [request] = trace_requests(POOL, [_line(0, length, hashes, output_length=4)], tokens_per_hash=8)
    assert (len(request.prompt), request.max_tokens) == (length, 4)


def test_another_seed_gives_other_tokens_with_the_same_structure() -> None:
    lines = [_line(0, 16, [1, 2]), _line(0, 16, [1, 3])]
    first, again, other = (trace_requests(POOL, lines, tokens_per_hash=8, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0].prompt[:8] != other[0].prompt[:8]
    assert other[0].prompt[:8] == other[1].prompt[:8]


@pytest.mark.parametrize(
    ("lines", "needle"),
    [
        (['{"timestamp": 1, "input_length": 4, "output_length": 4}', "oops"], "line 2"),
        (['{"timestamp": 1, "input_length": 0, "output_length": 4}'], "line 1.*input_length"),
        ([""], "no requests"),
    ],
)
def test_an_invalid_trace_is_reported_with_its_line(tmp_path: Path, lines: list[str], needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        read_trace(_write(tmp_path / "t.jsonl", *lines), 10)


def test_a_line_of_a_trace_ends_at_a_newline_alone(tmp_path: Path) -> None:
    row = {"timestamp": 1, "input_length": 10, "output_length": 2, "session": "a\u2028b\x85c"}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8-sig", newline="")
    assert len(read_trace(path, 10)) == 1


def test_a_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"nothing\.jsonl"):
        read_trace(tmp_path / "nothing.jsonl", 1)


def _conversation(*values: str) -> dict[str, object]:
    return {"id": "1", "conversations": [{"from": "human", "value": value} for value in values]}


def test_conversations_give_their_first_question_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([_conversation("a", "b", "c"), _conversation("alone"), {"id": "2"}]))
    assert read_sharegpt(path) == [("a", "b")]


@pytest.mark.parametrize(("content", "needle"), [("[", "not JSON"), ('[{"conversations": [{"from": 1}]}]', "value")])
def test_a_file_of_another_format_is_named_in_the_error(tmp_path: Path, content: str, needle: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(SetupError, match=needle):
        read_sharegpt(path)


def test_questions_may_generate_as_many_tokens_as_their_answer_has() -> None:
    requests = sharegpt_requests([("one two three four", "a b c d e f")], 5, count_tokens=_words)
    assert [(request.prompt, request.max_tokens) for request in requests] == [("one two three four", 6)]
    [request] = sharegpt_requests([("one two three four", "a")], 5, count_tokens=_words, output_len=9)
    assert request.max_tokens == 9


@pytest.mark.parametrize(
    ("question_len", "answer_len", "is_used"),
    [(3, 10, False), (4, 3, False), (4, 4, True), (1024, 1024, True), (1025, 4, False), (1024, 1025, False)],
)
def test_conversations_outside_the_length_bounds_are_skipped(question_len: int, answer_len: int, is_used: bool) -> None:
    pair = ("q " * question_len, "a " * answer_len)
    assert bool(sharegpt_requests([pair], 1, count_tokens=_words)) == is_used


def test_the_seed_determines_the_order_and_the_count_is_a_limit() -> None:
    pairs = [(f"question number {i} here", "an answer of words") for i in range(50)]
    first, again, other = (sharegpt_requests(pairs, 10, count_tokens=_words, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 10
