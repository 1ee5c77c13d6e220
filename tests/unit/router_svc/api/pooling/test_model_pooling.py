"""What the files of sentence-transformers say of pooling, in old and new forms, and what of it cannot be computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import RequestError, SetupError
from pdserve.base.pooling import PoolingKind
from router_svc.api.pooling.model_pooling import ModelPooling

_FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def flags(*names: str) -> dict[str, Any]:
    """A config as most models have it: all modes, of which some are on."""
    return {"word_embedding_dimension": 16, **{f"pooling_mode_{name}": name in names for name in _FLAGS}}


def write(directory: Path, pooling: dict[str, Any] | None, *others: str, path: str = "1_Pooling") -> Path:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": path, "type": "sentence_transformers.models.Pooling"})
    modules += [{"name": kind, "path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in others]
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (flags("lasttoken"), PoolingKind.LAST),
        (flags("cls_token"), PoolingKind.CLS),
        (flags("mean_tokens"), PoolingKind.MEAN),
        ({"pooling_mode": "mean"}, PoolingKind.MEAN),
        ({"pooling_mode": ["cls"]}, PoolingKind.CLS),
        ({}, PoolingKind.LAST),
        (None, PoolingKind.LAST),
    ],
)
def test_the_kind_is_that_of_the_files(tmp_path: Path, config: dict[str, Any] | None, kind: PoolingKind) -> None:
    found = ModelPooling.from_dir(write(tmp_path, config, "Normalize"), 16)
    assert (found.kind_for(None), found.dimensions) == (kind, 16)
    assert found.kind_for("mean") is PoolingKind.MEAN


def test_a_model_without_such_files_is_pooled_by_the_last_token(tmp_path: Path) -> None:
    found = ModelPooling.from_dir(tmp_path, 8)
    assert (found.kind_for(None), found.dimensions, found.prompts) == (PoolingKind.LAST, 8, {})


@pytest.mark.parametrize(
    ("config", "others", "what"),
    [
        (flags("max_tokens"), (), "max"),
        (flags("mean_tokens", "cls_token"), (), "cls and mean"),
        ({"pooling_mode": "weightedmean"}, (), "weightedmean"),
        (flags("mean_tokens"), ("Dense",), "Dense"),
    ],
)
def test_what_is_not_computed_is_refused_unless_the_request_says_otherwise(
    tmp_path: Path, config: dict[str, Any], others: tuple[str, ...], what: str
) -> None:
    found = ModelPooling.from_dir(write(tmp_path, config, *others), 16)
    with pytest.raises(RequestError, match=what):
        found.kind_for(None)
    assert found.kind_for("cls") is PoolingKind.CLS


def test_prompts_are_found_by_their_names(tmp_path: Path) -> None:
    config = {"prompts": {"query": "Query: ", "document": "", "none": None}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    found = ModelPooling.from_dir(tmp_path, 16)
    assert [found.prompt(name) for name in ("query", "document", None)] == ["Query: ", "", ""]
    with pytest.raises(RequestError, match="document, query"):
        found.prompt("passage")
    # Its tokens would belong to the mean.
    write(tmp_path, flags("mean_tokens") | {"include_prompt": False})
    with pytest.raises(RequestError, match="none"):
        ModelPooling.from_dir(tmp_path, 16).prompt("query")


@pytest.mark.parametrize("path", ["/etc", "../other", "a/../../b"])
def test_modules_are_within_the_model(tmp_path: Path, path: str) -> None:
    with pytest.raises(SetupError, match="path"):
        ModelPooling.from_dir(write(tmp_path, flags("cls_token"), path=path), 16)


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '[{"path": "x"}]', '[{"type": 1}]', "[" * 100_000])
def test_a_file_that_is_no_list_of_modules_is_an_error_of_the_setup(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(SetupError, match=r"modules\.json"):
        ModelPooling.from_dir(tmp_path, 16)
