"""Converts a GGUF file into a Hugging Face directory: bfloat16 safetensors, config, tokenizer, template. No torch.

All tensors become bfloat16, norms included. Models of these architectures were published in it, so F32 norms lose
nothing, and with a single dtype all weights can stay mapped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.gguf_config import SourceTensor, hf_config, source_tensors
from pdserve.model.fetch.gguf_file import GgufFile
from pdserve.model.fetch.gguf_keys import sampling_defaults
from pdserve.model.fetch.gguf_tokenizer import build_tokenizer, special_token
from pdserve.model.fetch.progress import ProgressCallback
from pdserve.model.tensors import check_tensors

if TYPE_CHECKING:
    import numpy as np

#: Part of the names of cached directories. Increase it when their content changes, so that older ones are not used.
CONVERTER_VERSION = 4


def convert_gguf(path: Path, out_dir: Path, progress: ProgressCallback) -> None:
    """Fills `out_dir`, which exists and is empty.

    Raises `SetupError` for an unsupported or damaged file, `OSError` when the disk is full.
    """
    try:
        _convert(path, out_dir, progress)
    except MemoryError as error:
        raise SetupError(f"{path} needs more memory than there is to convert it. Use a machine with more.") from error


def _convert(path: Path, out_dir: Path, progress: ProgressCallback) -> None:
    gguf = GgufFile(path)
    config = hf_config(gguf)
    sources = source_tensors(gguf)
    shapes = {name: gguf.tensors[source.gguf_name].shape for name, source in sources.items()}
    check_tensors(ModelConfig.from_hf(config), shapes, str(path))
    _write_json(out_dir / "config.json", config)
    _write_tokenizer(gguf, out_dir)
    _write_weights(gguf, sources, out_dir / "model.safetensors", progress)


def _write_tokenizer(gguf: GgufFile, out_dir: Path) -> None:
    metadata = gguf.metadata
    (out_dir / "tokenizer.json").write_text(build_tokenizer(metadata).to_str(), encoding="utf-8")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings: dict[str, object] = {key: special_token(metadata, name) for key, name in names.items()}
    settings = {key: value for key, value in settings.items() if value is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = metadata.text("tokenizer.chat_template", "")
    if of_tools := metadata.text("tokenizer.chat_template.tool_use", ""):
        named = {"default": template, "tool_use": of_tools}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif template:
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(out_dir / "tokenizer_config.json", settings)
    # Chat models may end a turn, or a message with calls, with another token than the end-of-text token.
    ends = [token for kind in ("eos", "eot", "eom") for token in metadata.token_ids(f"tokenizer.ggml.{kind}_token_id")]
    generation = {"eos_token_id": list(dict.fromkeys(ends)), **sampling_defaults(metadata)}
    _write_json(out_dir / "generation_config.json", generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(gguf: GgufFile, sources: dict[str, SourceTensor], path: Path, progress: ProgressCallback) -> None:
    """Writes the safetensors format: length of the header, the header, and the tensors without gaps.

    Source: https://github.com/huggingface/safetensors#format. Its own writer needs all tensors in memory at once.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, source in sources.items():
        shape = gguf.tensors[source.gguf_name].shape
        end = position + 2 * _product(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header).encode()
    # Align the data to cache lines, for fast reads of the mapped file.
    encoded += b" " * (-(len(encoded) + 8) % 64)
    what = f"Converting {gguf.path.name}"
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for done in _write_tensors(gguf, sources, file):
            progress(what, done, position)


def _write_tensors(gguf: GgufFile, sources: dict[str, SourceTensor], file: BinaryIO) -> Iterator[int]:
    """Yields the number of bytes written so far, first 0."""
    done = 0
    yield done
    for source in sources.values():
        values = gguf.array(source.gguf_name)
        if source.permuted_heads:
            values = _unpermuted(values, source.permuted_heads)
        done += file.write(_to_bfloat16(values).tobytes())
        yield done


def _unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head from (pair, half) to (half, pair), the order that rotate-half expects."""
    rows = values.shape[0]
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds finite values to bfloat16, to nearest, ties to even; returned as uint16."""
    import numpy as np

    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
