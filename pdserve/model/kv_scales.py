"""Scales of an fp8 KV cache: one per layer, K or V, and KV head, from the checkpoint or else 1."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.loader import open_checkpoint
from pdserve.model.tensors import kv_scale_names

_DIGEST_BYTES = 8


def read_kv_scales(model_dir: Path, config: ModelConfig) -> Tensor:
    """Float32 [num_layers, 2 (K, V), num_kv_heads]. The cache stores x / scale; 1 where the checkpoint has no scale.

    Checkpoints have one scale for K and one for V of a layer, or one for each KV head. Raises `SetupError`.
    """
    scales = torch.ones(config.num_layers, 2, config.num_kv_heads)
    with open_checkpoint(model_dir) as file_of:
        for layer in range(config.num_layers):
            for k_or_v, names in enumerate(kv_scale_names(layer)):
                for name in names:
                    if name in file_of:
                        tensor = file_of[name].get_tensor(name)
                        scales[layer, k_or_v] = _checked(tensor, config, f"{model_dir}: {name}")
    return scales


def scales_digest(scales: Tensor) -> str:
    """16 hex digits that workers must have in common: with other scales, a block's bytes have another meaning."""
    return hashlib.blake2b(scales.numpy().tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


def _checked(tensor: Tensor, config: ModelConfig, where: str) -> Tensor:
    values = tensor.float().flatten()
    if len(values) not in (1, config.num_kv_heads):
        raise SetupError(
            f"{where} has {len(values)} numbers, but must have 1, or {config.num_kv_heads} (one per KV head)."
        )
    wrong = [value for value in values.tolist() if not 0 < value < math.inf]
    if wrong:
        raise SetupError(f"{where} is {wrong[0]}, but a scale of the KV cache must be a finite number above 0.")
    return values
