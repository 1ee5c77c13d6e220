"""Every field that transformers reads of a model's files is used, refused by name, or known to have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.fetch import gguf_keys
from pdserve.model.fields import Fields
from pdserve.model.known_fields import CONFIG, FILES, GENERATION, TOKENIZER, KnownFields, check_directory
from pdserve.model.resolve import resolve_model
from pdserve.model.tokenizer_settings import TokenizerSettings
from router_svc.api.sampling_defaults import SamplingDefaults
from tests.support.lazily import transformers
from tests.unit.model.tiny import LLAMA

ALL = {**FILES, "GGUF": gguf_keys.MODEL, "GGUF tokenizer": gguf_keys.TOKENIZER, "GGUF sampling": gguf_keys.SAMPLING}
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Noted(Mapping[str, object]):
    """An object that notes which of its names are read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.values_, self.read = values, set[str]()

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


@pytest.mark.parametrize("known", ALL.values(), ids=ALL)
def test_no_field_has_two_meanings(known: KnownFields) -> None:
    assert len(known.names) == len(known.used) + len(known.refused) + len(known.ignored)


def test_the_fields_of_a_config_that_are_used_are_those_that_are_read() -> None:
    read = set[str]()
    for family, name in FAMILIES.items():
        for more in ({}, {"use_sliding_window": True}, {"rope_scaling": {"type": "linear", "factor": 2.0}}):
            config = LLAMA | {"model_type": family, "architectures": [f"{name}ForCausalLM"]} | more
            noted = Noted(config)
            ModelConfig.from_hf(noted)
            read |= noted.read
    assert read - CONFIG.refused.keys() == CONFIG.used


def test_the_fields_of_a_tokenizer_that_are_used_are_those_that_are_read() -> None:
    # Others are read by the chat template, the forms of messages, and the facts about a model.
    elsewhere = {"chat_template", "response_template", "mask_token"}
    source = Path(TokenizerSettings.__module__.replace(".", "/") + ".py").read_text(encoding="utf-8")
    assert {name for name in TOKENIZER.used if f'"{name}"' in source} == TOKENIZER.used - elsewhere
    assert set(SamplingDefaults.model_fields) | {"eos_token_id"} == GENERATION.used


@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_field_of_a_config_of_transformers_is_known(name: str) -> None:
    fields = getattr(transformers, f"{name}Config")().to_dict()
    assert CONFIG.unknown(Fields(fields, "config.json")) == []


def test_every_field_of_a_generation_config_of_transformers_is_known() -> None:
    fields = transformers.GenerationConfig().to_dict()
    assert GENERATION.unknown(Fields(fields, "generation_config.json")) == []
    # And what it has by default changes nothing.
    GENERATION.check(Fields(fields, "generation_config.json"))


REFUSALS = [(file, name) for file, known in ALL.items() for name in known.refused]


@pytest.mark.parametrize(("file", "name"), REFUSALS)
def test_a_field_that_would_change_answers_is_refused_by_name_unless_it_asks_for_nothing(file: str, name: str) -> None:
    known = ALL[file]
    for neutral in (None, *known.refused[name]):
        known.check(Fields({name: neutral}, file))
    with pytest.raises(SetupError, match=f"{file}: {name} is not supported"):
        known.check(Fields({name: 0.123}, file))


def _write(directory: Path, **files: dict[str, Any]) -> Path:
    for name, content in {"config": LLAMA, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("files", "needle"),
    [
        ({"generation_config": {"suppress_tokens": [3]}}, "suppress_tokens"),
        ({"generation_config": {"num_beams": 4}}, "num_beams is not supported .supported: 1."),
        ({"tokenizer_config": {"split_special_tokens": True}}, "split_special_tokens"),
        ({"config": LLAMA | {"no_repeat_ngram_size": 3}}, "no_repeat_ngram_size"),
    ],
)
def test_such_a_model_is_refused_before_anything_starts(
    tmp_path: Path, files: dict[str, dict[str, Any]], needle: str
) -> None:
    with pytest.raises(SetupError, match=needle):
        resolve_model(str(_write(tmp_path, **files)))


def test_a_generation_config_replaces_the_configs_fields(tmp_path: Path) -> None:
    directory = _write(tmp_path, config=LLAMA | {"temperature": 0.5, "no_repeat_ngram_size": 3}, generation_config={})
    assert check_directory(directory) == {}
    assert SamplingDefaults.from_dir(directory) == SamplingDefaults()
    (directory / "generation_config.json").unlink()
    assert SamplingDefaults.from_dir(directory).temperature == 0.5


def test_unknown_fields_are_reported_by_file(tmp_path: Path) -> None:
    directory = _write(tmp_path, config=LLAMA | {"mystery": 1, "_private": 2}, generation_config={"chat_format": "x"})
    assert check_directory(directory) == {"config.json": ["mystery"], "generation_config.json": ["chat_format"]}
