"""Each area with its corpus and the first seeds; `make fuzz` goes on from there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.fuzz.__main__ import area_of
from tests.fuzz.area import fuzz

#: Seeds for each target: every run takes processor time of `make test`.
NUM_SEEDS = {"grpc": 8, "http": 10, "internal": 1, "records": 5}


@pytest.mark.parametrize("name", NUM_SEEDS)
def test_no_input_of_strangers_breaks_anything(name: str, tmp_path: Path) -> None:
    report = fuzz(area_of(name), first_seed=0, num_seeds=NUM_SEEDS[name], until=math.inf, found=tmp_path)
    assert report.findings == []
    assert len(report.outcomes) > 1, f"all inputs had one outcome: {report}"


@pytest.mark.parametrize("name", NUM_SEEDS)
def test_a_seed_always_makes_the_same_input(name: str) -> None:
    area = area_of(name)
    for target in area.targets:
        assert [area.make(target, seed) for seed in range(20)] == [area.make(target, seed) for seed in range(20)]
