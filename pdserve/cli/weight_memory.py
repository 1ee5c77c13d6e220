"""How much memory a worker's own copy of the weights will take, estimated without loading them, nor torch."""

from __future__ import annotations

from pathlib import Path

from kernels.cpu import native
from pdserve.cli.model_sizes import SizeOptions, model_sizes
from pdserve.cli.up_config import UpConfig
from pdserve.model.config import ModelConfig


def private_weight_bytes(model_dir: Path, config: UpConfig) -> int:
    """Bytes for each worker; 0 where workers share the mapped file, or use a GPU. Raises `SetupError`."""
    if config.device != "cpu":
        return 0
    instruction_set = None
    if config.kernels in ("auto", "cpu"):
        instruction_set = packing_instruction_set(max(config.num_ranks.values()), config.kv_cache_dtype)
    options = SizeOptions(dtype=config.dtype, quantization=config.quantization, packed_for=instruction_set)
    return model_sizes(ModelConfig.from_dir(model_dir), options).private_weight_bytes


def packing_instruction_set(num_ranks: int, kv_cache_dtype: str) -> str | None:
    """Instruction set of the C++ kernels that CPU workers on this machine will use; None where weights stay unpacked.

    The kernels serve neither ranks nor 8-bit KV.
    """
    if num_ranks > 1 or kv_cache_dtype != "auto" or native.missing_reason() is not None:
        return None
    module = native.load()
    names: list[str] = [] if module is None else module.instruction_sets()
    return names[0] if names else None
