"""Every damaged file of a model is read or refused with one line: no traceback, no panic, no memory without bound."""

from __future__ import annotations

import pytest

from tests.fuzz.files.targets import TARGETS, Seeds, run

#: Damaged files of each kind in `make test`; `make fuzz` goes on from there.
NUM_FILES = 60


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_read_or_refused_with_one_line(name: str, seeds: Seeds) -> None:
    outcomes = [run(name, seeds, seed) for seed in range(NUM_FILES)]
    assert not all(outcomes), "no damage was noticed: does the target read the damaged file?"


def test_the_same_seed_damages_a_file_in_the_same_way(seeds: Seeds) -> None:
    first, second = ([run("read_gguf", seeds, seed) for seed in range(5)] for _ in range(2))
    assert first == second
