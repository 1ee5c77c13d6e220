"""Forged headers: each is refused with an error of one line, before it takes memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.gguf_file import GgufFile
from tests.unit.model.fetch.gguf_files import write_model
from tests.unit.model.tiny import LLAMA, random_tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*, tensors: int = 0, values: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values)


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def array(item_type: int, count: int) -> bytes:
    return text("a") + struct.pack("<IIQ", 9, item_type, count)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "ends within its header"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (header(version=1), "GGUF version 1"),
        (header(version=0x03000000), "GGUF version"),
        (header(values=2**62), "ends within its header"),
        (header(tensors=2**62), r"4611686018427387904 tensors \(limit 131072\)"),
        (header(values=1) + struct.pack("<Q", 2**63), "a header above 134217728 bytes"),
        (header(values=1) + array(0, 2**60), "more than 4194304 items"),
        (header(values=1) + array(8, 2**60), "more than 4194304 items"),
        (header(values=1) + array(9, 2), "type 9, which is not in the specification"),
        (header(values=1) + text("a") + struct.pack("<I", 99), "type 99, which is not in the specification"),
        (header(values=1) + struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1), "not UTF-8"),
        (header(tensors=1) + tensor("x", [2**40, 2**40]), "each dimension must be between 1 and 2147483647"),
        # 8 elements to a reader that keeps 32 bits of it, as of CVE-2026-53923. Fails with such a reader.
        (header(tensors=1) + tensor("x", [2**32 + 8]) + bytes(64), "each dimension must be between 1 and 2147483647"),
        (header(tensors=1) + tensor("x", [2**31 - 1] * 4), "beyond the end of the file"),
        (header(tensors=1) + tensor("x", [0]), r"shape \[0\], but each dimension must be"),
        (header(tensors=1) + tensor("x", []), "has 0 dimensions"),
        (header(tensors=1) + tensor("x", [1] * 9), "has 9 dimensions"),
        (header(tensors=1) + tensor("x", [8], kind=250) + bytes(64), "type 250, which is not in the specification"),
        (header(tensors=1) + tensor("x", [8], kind=3) + bytes(64), "8 elements, but must have a multiple of 32"),
        (header(tensors=1) + tensor("x", [8], offset=2**63) + bytes(64), "beyond the end of the file"),
        (header(tensors=2) + tensor("x", [1]) * 2 + bytes(64), "two tensors of the same name"),
        (
            header(values=1) + text("general.alignment") + struct.pack("<II", 4, 3),
            "general.alignment is 3, but must be a power of two",
        ),
    ],
)
def test_a_forged_header_is_refused_before_it_takes_memory(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(SetupError, match=message):
            GgufFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    config = ModelConfig.from_hf(LLAMA)
    write_model(path, "llama", config, random_tensors(config))
    return path


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere_in_the_header_is_either_harmless_or_refused(
    intact: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """CVE-2026-7482. Fails where `_located` lets a tensor end beyond the end of the file."""
    content = bytearray(intact.read_bytes())
    position = data.draw(st.integers(0, 6000))
    content[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), 5000, 300]))])
    try:
        file = GgufFile(path)
    except SetupError:
        return
    for located in file.tensors.values():
        assert located.offset + located.num_bytes <= path.stat().st_size


def test_an_intact_file_reads_as_with_the_gguf_library(intact: Path) -> None:
    ours, theirs = GgufFile(intact), gguf.GGUFReader(intact)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert np.array_equal(ours.array(tensor.name), np.array(tensor.data))
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata.raw(name) == field.contents(), name


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_quantized_blocks_are_dequantized(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "x.gguf")
    assert file.tensors["x"].type_name == kind.name
    assert np.abs(file.array("x") - values).max() < 0.25
