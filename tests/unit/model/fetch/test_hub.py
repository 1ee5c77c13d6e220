"""Models of a hub: what broke off goes on, and what arrived is compared with the hub's digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.fetch.hub import fill_from_hub
from pdserve.model.fetch.progress import silent
from tests.unit.model.fetch.fake_hub import FakeHub, serving

WEIGHTS = bytes(range(256)) * 400


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"text"}
    with serving(FakeHub(files)) as hub:
        yield hub


def test_a_directory_gets_the_files_that_a_model_needs(hub: FakeHub, tmp_path: Path) -> None:
    fill_from_hub("org/name", tmp_path, silent, endpoint=hub.url)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
    }


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_refused_removed_and_downloaded_again(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.sent[name] = hub.files[name][:-1] + b"?"
    with pytest.raises(SetupError, match=rf"{name} of org/name arrived with another digest than the hub's\. Run it"):
        fill_from_hub("org/name", tmp_path, silent, endpoint=hub.url)
    assert not (tmp_path / name).exists()
    hub.sent.clear()
    fill_from_hub("org/name", tmp_path, silent, endpoint=hub.url)
    assert (tmp_path / name).read_bytes() == hub.files[name]


def test_a_download_that_broke_off_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.breaks_off["model.safetensors"] = 60_000
    fill_from_hub("org/name", tmp_path, silent, endpoint=hub.url)
    assert hub.offsets["model.safetensors"] == [0, 60_000]
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_an_unreachable_hub_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^Cannot get org/name from the model hub: [^\n]*Run it again[^\n]*$"):
        fill_from_hub("org/name", tmp_path, silent, endpoint="http://127.0.0.1:9")
