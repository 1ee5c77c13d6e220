"""Measured speeds from the results of `pdserve bench serve`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.cli.plan.capacity import Speeds

_NEEDED = (
    "completed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "max_concurrent_requests",
    "median_ttft_ms",
    "median_tpot_ms",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Speeds of one worker of each tier, and the lengths with which they were measured."""

    speeds: Speeds
    model: str
    mean_input_tokens: float
    mean_output_tokens: float
    num_runs: int


def parse_profile(text: str, where: str, *, num_prefill: int, num_decode: int) -> Profile:
    """The profile in a result file; the numbers are those of workers that were measured. Raises `SetupError`.

    Prompts: the faster of two lower bounds, tokens of a prompt by its TTFT and prompt tokens of the whole run by its
    duration. Decoding: the largest output throughput of all runs, and its TPOT.
    """
    runs = _runs(text, where)
    best = max(runs, key=lambda run: run["output_throughput"])
    prefill = max(max(_by_ttft(run), run["total_input_tokens"] / run["duration"] / num_prefill) for run in runs)
    return Profile(
        speeds=Speeds(
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=best["output_throughput"] / num_decode,
            decoding=max(1, round(best["max_concurrent_requests"] / num_decode)),
            tpot_s=best["median_tpot_ms"] / 1000,
        ),
        model=_model(text),
        mean_input_tokens=best["total_input_tokens"] / best["completed"],
        mean_output_tokens=best["total_output_tokens"] / best["completed"],
        num_runs=len(runs),
    )


def _by_ttft(run: Mapping[str, float]) -> float:
    return run["total_input_tokens"] / run["completed"] / (run["median_ttft_ms"] / 1000)


def _runs(text: str, where: str) -> Sequence[Mapping[str, float]]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SetupError(f"The profile {where} is not JSON: {error}. Make one with pdserve bench serve.") from error
    found = content.get("runs", [content]) if isinstance(content, dict) else []
    runs = [run for run in found if isinstance(run, dict) and all(_is_positive(run.get(name)) for name in _NEEDED)]
    if not runs:
        raise SetupError(
            f"The profile {where} has no run with {', '.join(_NEEDED)} above 0. Make one with pdserve bench serve "
            "--save-result, with more than one output token per request."
        )
    return runs


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _model(text: str) -> str:
    content = json.loads(text)
    first = content.get("runs", [content])[0]
    return str(first.get("model_id", ""))
