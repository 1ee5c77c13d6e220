"""Settings become a workload."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.cli.bench.config import ServeConfig
from pdserve.cli.bench.datasets import TokenPool
from pdserve.cli.bench.plan import plan
from pdserve.cli.bench.vocabulary import Vocabulary

VOCABULARY = Vocabulary(pool=TokenPool(tuple(range(500))), count_tokens=lambda text: len(text.split()))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 500 * i, "input_length": 4, "output_length": 2} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_trace_keeps_its_own_times_unless_a_rate_is_given(trace: str) -> None:
    config = ServeConfig(dataset_name="trace", dataset_path=trace, num_prompts=3)
    assert plan(config, VOCABULARY, rate=math.inf).arrivals_s == [0.0, 0.5, 1.0]
    assert plan(config, VOCABULARY, rate=4.0).arrivals_s[-1] == pytest.approx(0.5)


def test_a_trace_with_fewer_requests_than_configured_is_sent_whole(trace: str) -> None:
    workload = plan(ServeConfig(dataset_name="trace", dataset_path=trace), VOCABULARY, rate=math.inf)
    assert len(workload.requests) == len(workload.arrivals_s) == 5


def test_a_ramp_determines_the_send_times() -> None:
    config = ServeConfig(
        num_prompts=5, ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=4, burstiness=1e12
    )
    times = plan(config, VOCABULARY, rate=math.inf).arrivals_s
    assert [1 / (later - earlier) for earlier, later in pairwise(times)] == pytest.approx([1, 2, 3, 4], rel=1e-4)


def test_runs_and_warm_ups_share_no_prompt() -> None:
    config = ServeConfig(num_prompts=3, num_warmups=3, random_input_len=16)
    runs = [plan(config, VOCABULARY, rate=1.0, run=run) for run in (0, 1)]
    prompts = [request.prompt for run in runs for request in run.requests + run.warmups]
    assert len(set(prompts)) == 12


def test_the_same_settings_give_the_same_workload() -> None:
    config = ServeConfig(num_prompts=3, num_warmups=1, random_input_len=16)
    assert plan(config, VOCABULARY, rate=2.0, run=1) == plan(config, VOCABULARY, rate=2.0, run=1)
