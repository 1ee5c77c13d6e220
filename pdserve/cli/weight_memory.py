"""How much memory a worker's own copy of the weights will take, estimated without loading them, nor torch."""

from __future__ import annotations

from pathlib import Path

from kernels.cpu import native
from pdserve.cli.up_config import UpConfig
from pdserve.model.checkpoint import weight_files
from pdserve.model.config import ModelConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Bytes of a packed weight (`kernels/cpu/src/pack.h`), in all dtypes but bfloat16.
_PACKED_BYTES = 4
#: Instruction sets whose kernels read bfloat16 weights of 12 bits, and others, which read all 16.
_CODED, _CODED_BYTES, _PLAIN_BYTES = frozenset(("avx512", "avx512_bf16")), 1.5, 2.0


def private_weight_bytes(model_dir: Path, config: UpConfig) -> int:
    """Bytes for each worker; 0 where workers share the mapped file, or use a GPU. Raises `SetupError`."""
    if config.device != "cpu":
        return 0
    model = ModelConfig.from_dir(model_dir)
    elements = sum(path.stat().st_size for path in weight_files(model_dir)) // _ITEM_BYTES[model.dtype]
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if not _packs(config):
        return 0 if dtype == model.dtype else elements * _ITEM_BYTES[dtype]
    embedding = model.vocab_size * model.hidden_size
    packed = elements if model.tie_word_embeddings else elements - embedding
    # The embedding is read from the mapped file, or from a copy of another dtype.
    converted = 0 if dtype == model.dtype else embedding * _ITEM_BYTES[dtype]
    return int(packed * packed_item_bytes(dtype, config.quantization, _instruction_set())) + converted


def packed_item_bytes(dtype: str, quantization: str | None, instruction_set: str) -> float:
    """Bytes of a packed weight."""
    if quantization == "int8":
        return 1.0
    if dtype != "bfloat16":
        return _PACKED_BYTES
    return _CODED_BYTES if instruction_set in _CODED else _PLAIN_BYTES


def _packs(config: UpConfig) -> bool:
    """Whether workers pack weights: those with C++ kernels, which serve neither ranks nor 8-bit KV."""
    is_possible = config.kv_cache_dtype == "auto" and max(config.num_ranks.values()) == 1
    return config.kernels in ("auto", "cpu") and is_possible and native.missing_reason() is None


def _instruction_set() -> str:
    module = native.load()
    names: list[str] = [] if module is None else module.instruction_sets()
    return names[0] if names else ""
