"""Facts of a model, from its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from router_svc.api.ollama.facts import ModelFacts
from tests.support.tiny_model import write_model


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    os.utime(directory / "config.json", (0, 1_000_000_000))
    facts = ModelFacts.from_dir(directory)
    assert facts.modified_at == "2001-09-09T01:46:40.000000Z"
    config = json.loads((directory / "config.json").read_bytes())
    vocabulary, hidden, inner, layers = (
        config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    # Two heads of queries, one of keys and of values, each of half the hidden size.
    layer = 2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * inner + 2 * hidden
    assert facts.num_parameters == 2 * vocabulary * hidden + layers * layer + hidden
    assert facts.weight_bytes is None
    (directory / "model.safetensors").write_bytes(b"x" * 1000)
    assert ModelFacts.from_dir(directory).weight_bytes == 1000


def test_what_workers_have_rounded_weights_to_comes_before_their_type(tmp_path: Path) -> None:
    facts = ModelFacts.from_dir(write_model(tmp_path / "m"))
    for reported, level in (
        ([], "F32"),
        (["f0"], "F32"),
        (["f0", "int8"], "INT8"),
        # The type that an fp8 cache was computed with, and the length by which some models rotate.
        (["f0", "bfloat16", "kv-scales-1"], "F32"),
        (["f0", "8192"], "F32"),
        (["int8"], "F32"),
    ):
        assert facts.quantization_level(reported) == level


@pytest.mark.parametrize(
    ("count", "shown"),
    [(999, "999"), (25_400, "25K"), (134_515_008, "134.52M"), (7_615_616_512, "7.6B"), (70_553_706_496, "70.6B")],
)
def test_sizes_are_as_people_say_them(tmp_path: Path, count: int, shown: str) -> None:
    config = ModelFacts.from_dir(write_model(tmp_path / "m")).config
    facts = ModelFacts(config=config, num_parameters=count, modified_at="", weight_bytes=None)
    assert facts.parameter_size == shown
