"""Workloads from files: conversations in ShareGPT's format, and traces in Mooncake's, one JSON object per line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pdserve.base.errors import SetupError
from pdserve.cli.bench.datasets import Pool, Seed, sample_units
from pdserve.cli.bench.workload import BenchRequest

#: Bounds of the conversations that are used, as in `vllm bench serve`.
MIN_TOKENS = 4
MAX_INPUT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


class TraceLine(BaseModel):
    """One request of a trace. Requests whose `hash_ids` start alike have the same tokens there."""

    timestamp: float
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[int] = []


class _Turn(BaseModel):
    value: str


class _Conversation(BaseModel):
    conversations: list[_Turn] = []


def read_trace(path: Path, count: int) -> list[TraceLine]:
    """The first `count` requests of a trace by time. Raises `SetupError` that names an invalid line."""
    lines = []
    for number, text in enumerate(_read(path).split("\n"), start=1):
        if text.strip():
            try:
                lines.append(TraceLine.model_validate_json(text))
            except ValidationError as error:
                raise SetupError(f"{path}, line {number}, is not a request of a trace: {_first(error)}.") from error
    if not lines:
        raise SetupError(f"{path} has no requests.")
    return sorted(lines, key=lambda line: line.timestamp)[:count]


def trace_requests(
    pool: Pool, lines: Sequence[TraceLine], *, tokens_per_hash: int, seed: Seed = 0
) -> list[BenchRequest]:
    """Requests with the lengths and common prefixes of a trace.

    Each hash stands for `tokens_per_hash` units, the same wherever it occurs. Units beyond a line's hashes are random.
    """
    requests = []
    for index, line in enumerate(lines):
        units: list[int] = []
        for hash_id in line.hash_ids:
            if len(units) < line.input_length:
                units += sample_units(random.Random(f"trace:{seed}:hash:{hash_id}"), pool, tokens_per_hash)
        units += sample_units(random.Random(f"trace:{seed}:line:{index}"), pool, line.input_length - len(units))
        requests.append(BenchRequest(prompt=pool.prompt(units[: line.input_length]), max_tokens=line.output_length))
    return requests


def trace_arrivals_s(lines: Sequence[TraceLine], sec_multiplier: float) -> list[float]:
    """Send times of a trace's requests in seconds, the first 0."""
    return [(line.timestamp - lines[0].timestamp) * sec_multiplier for line in lines]


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """The first question and answer of each conversation. Raises `SetupError` for a file of another format."""
    try:
        conversations = TypeAdapter(list[_Conversation]).validate_python(json.loads(_read(path)))
    except ValidationError as error:
        raise SetupError(f"{path} does not contain conversations in ShareGPT's format: {_first(error)}.") from error
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}.") from error
    turns = (conversation.conversations[:2] for conversation in conversations)
    return [(first.value, second.value) for first, second in (pair for pair in turns if len(pair) == 2)]


def sharegpt_requests(
    pairs: Sequence[tuple[str, str]],
    count: int,
    *,
    count_tokens: Callable[[str], int],
    output_len: int | None = None,
    seed: Seed = 0,
) -> list[BenchRequest]:
    """Up to `count` questions in random order, without very short and very long ones.

    The number of tokens to generate is `output_len`, or if None the length of the question's answer.
    """
    order = list(pairs)
    random.Random(f"sharegpt:{seed}").shuffle(order)
    requests: list[BenchRequest] = []
    for question, answer in order:
        if len(requests) == count:
            break
        input_tokens = count_tokens(question)
        max_tokens = count_tokens(answer) if output_len is None else output_len
        if _is_within_bounds(input_tokens, max_tokens):
            requests.append(BenchRequest(prompt=question, max_tokens=max_tokens))
    return requests


def _is_within_bounds(input_tokens: int, output_tokens: int) -> bool:
    return (
        MIN_TOKENS <= input_tokens <= MAX_INPUT_TOKENS
        and output_tokens >= MIN_TOKENS
        and input_tokens + output_tokens <= _MAX_TOTAL_TOKENS
    )


def _read(path: Path) -> str:
    try:
        # Some editors write a byte order mark.
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"Cannot read {path}: {error}.") from error


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]
