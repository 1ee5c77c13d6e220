"""Models of a hub: what broke off goes on, and what arrived is compared with the hub's digests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.fetch.download import fetch_from_hub
from pdserve.model.fetch.hub import fill_from_hub
from pdserve.model.fetch.hub_name import HubName, hub_name
from pdserve.model.fetch.progress import silent
from pdserve.model.fetch.snapshot import verify_snapshot
from pdserve.model.revision import revision_of
from tests.unit.model.fetch.fake_hub import COMMIT, OLDER, FakeHub, git_blob_id, serving

WEIGHTS = bytes(range(256)) * 400
NEWEST, OTHER = HubName(repo_id="org/name", revision=None), HubName(repo_id="org/other", revision=None)
#: The older commit by each of its names.
REVISIONS = ["v1.0", "feature/x", OLDER]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"text"}
    older = {"config.json": b"[]", "model.safetensors": WEIGHTS[1:]}
    with serving(FakeHub(files, revisions=dict.fromkeys(REVISIONS, OLDER), older={OLDER: older})) as hub:
        yield hub


def test_a_directory_gets_the_files_that_a_model_needs(hub: FakeHub, tmp_path: Path) -> None:
    fill_from_hub(NEWEST, tmp_path, silent, endpoint=hub.url)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
    }


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_refused_removed_and_downloaded_again(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.sent[name] = hub.files[name][:-1] + b"?"
    with pytest.raises(SetupError, match=rf"{name} of org/name arrived with another digest than the hub's\. Run it"):
        fill_from_hub(NEWEST, tmp_path, silent, endpoint=hub.url)
    assert not (tmp_path / name).exists()
    hub.sent.clear()
    fill_from_hub(NEWEST, tmp_path, silent, endpoint=hub.url)
    assert (tmp_path / name).read_bytes() == hub.files[name]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_of_a_snapshot_is_refused_and_downloaded_again(hub: FakeHub, tmp_path: Path, name: str) -> None:
    """Fails without `verify_snapshot`: the hub's client compares sizes only."""
    hub.sent[name] = hub.files[name][:-1] + b"?"
    with pytest.raises(SetupError, match=rf"^{name} of org/name has another digest than the hub's\. Run it again"):
        fetch_from_hub(NEWEST, silent, cache_dir=tmp_path, endpoint=hub.url)
    hub.sent.clear()
    path = fetch_from_hub(NEWEST, silent, cache_dir=tmp_path, endpoint=hub.url)
    assert (path / name).read_bytes() == hub.files[name]


def test_git_names_of_small_files_are_compared_too(tmp_path: Path) -> None:
    content = b"{}"
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / git_blob_id(content)
    blob.write_bytes(content)
    (snapshot / "config.json").symlink_to(blob)
    verify_snapshot("org/name", snapshot)
    blob.write_bytes(b"[]")
    with pytest.raises(SetupError, match=r"config\.json of org/name"):
        verify_snapshot("org/name", snapshot)
    assert not blob.exists()


def test_a_download_that_broke_off_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.breaks_off["model.safetensors"] = 60_000
    fill_from_hub(NEWEST, tmp_path, silent, endpoint=hub.url)
    assert hub.offsets["model.safetensors"] == [0, 60_000]
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS


def test_an_unreachable_hub_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^Cannot get org/name from the model hub: [^\n]*Run it again[^\n]*$"):
        fill_from_hub(NEWEST, tmp_path, silent, endpoint="http://127.0.0.1:9")


def test_a_gated_model_is_refused_with_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(SetupError, match=r"^org/name is gated\. Accept its terms on \S+/org/name, .*HF_TOKEN_PATH\.$"):
        fill_from_hub(NEWEST, tmp_path, silent, endpoint=hub.url)


def test_an_unknown_model_is_refused_with_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^The model hub has no org/other, or does not show it .*HF_TOKEN_PATH\.$"):
        fill_from_hub(OTHER, tmp_path, silent, endpoint=hub.url)


def test_the_environment_names_a_mirror_and_a_file_with_the_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    (tmp_path / "token").write_text("hf_secret\n")
    code = f"from pathlib import Path; from {fill_from_hub.__module__} import HubName, fill_from_hub; "
    code += f"fill_from_hub({NEWEST!r}, Path({str(tmp_path / 'model')!r}), print)"
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(tmp_path / "token"), "HF_HUB_DISABLE_XET": "1"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | variables, check=True, capture_output=True)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS


def test_offline_a_model_comes_from_the_cache_of_the_hubs_client_or_not_at_all(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = fetch_from_hub(NEWEST, silent, cache_dir=tmp_path, endpoint=hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch_from_hub(NEWEST, silent, cache_dir=tmp_path, endpoint=hub.url) == cached
    with pytest.raises(SetupError, match=r"^org/other is not on this machine, and HF_HUB_OFFLINE .*pdserve fetch"):
        fetch_from_hub(OTHER, silent, cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(SetupError, match=r"^org/name is not on this machine, and HF_HUB_OFFLINE"):
        fill_from_hub(NEWEST, tmp_path / "other", silent, endpoint=hub.url)


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_revision_is_taken_and_its_commit_reported(hub: FakeHub, tmp_path: Path, revision: str) -> None:
    """By both ways: into a directory, and into the cache of the hub's client."""
    model = hub_name(f"org/name@{revision}")
    assert model is not None
    assert fill_from_hub(model, tmp_path / "made", silent, endpoint=hub.url) == OLDER
    cached = fetch_from_hub(model, silent, cache_dir=tmp_path / "cache", endpoint=hub.url)
    for directory in (tmp_path / "made", cached):
        assert {name: (directory / name).read_bytes() for name in hub.older[OLDER]} == hub.older[OLDER]
    assert revision_of(cached) == OLDER
    newest = fetch_from_hub(NEWEST, silent, cache_dir=tmp_path / "cache", endpoint=hub.url)
    assert (revision_of(newest), (newest / "config.json").read_bytes()) == (COMMIT, b"{}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_a_pinned_commit_are_compared_with_its_digests(hub: FakeHub, tmp_path: Path, name: str) -> None:
    """The hub sends those of the newest commit."""
    hub.sent[name] = hub.files[name]
    model = HubName(repo_id="org/name", revision=OLDER)
    with pytest.raises(SetupError, match=rf"{name} of org/name@{OLDER} arrived with another digest"):
        fill_from_hub(model, tmp_path / "made", silent, endpoint=hub.url)
    with pytest.raises(SetupError, match=rf"{name} of org/name@{OLDER} has another digest"):
        fetch_from_hub(model, silent, cache_dir=tmp_path / "cache", endpoint=hub.url)


def test_a_hub_that_answers_with_another_commit_than_the_pinned_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.revisions[OLDER] = COMMIT
    model = HubName(repo_id="org/name", revision=OLDER)
    with pytest.raises(SetupError, match=rf"answers for org/name@{OLDER} with commit '{COMMIT}'"):
        fill_from_hub(model, tmp_path / "made", silent, endpoint=hub.url)


def test_an_unknown_revision_is_refused_with_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^org/name has no revision v9 on the model hub\. Name a branch"):
        fill_from_hub(HubName(repo_id="org/name", revision="v9"), tmp_path, silent, endpoint=hub.url)


@pytest.mark.parametrize(
    "name", ["org/name@", "org/name@-x", "org/name@a b", "name@v1", "org/name@v1.gguf", "a/b/c", "@v1"]
)
def test_other_names_mean_no_model_of_a_hub(name: str) -> None:
    assert hub_name(name) is None
