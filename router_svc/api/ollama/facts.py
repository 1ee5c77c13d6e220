"""What a router knows of its model from the model's files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.checkpoint import weight_files
from pdserve.model.config import ModelConfig
from pdserve.model.tensors import tensor_shapes
from router_svc.api.ollama.timing import rfc3339

#: Names of types of weights in this API.
_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: What workers round weights to, by the name behind the model's fingerprint in what they report.
_ROUNDED = {"int8": "INT8"}
_SUFFIXES = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of one model."""

    config: ModelConfig
    num_parameters: int
    #: When `config.json` was written, as RFC 3339.
    modified_at: str
    #: Bytes of the weight files; None: the router's machine has none of them.
    weight_bytes: int | None

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelFacts:
        """The facts of the model in this directory. Raises `SetupError`."""
        config = ModelConfig.from_dir(model_dir)
        written = (model_dir / "config.json").stat().st_mtime
        return cls(
            config=config,
            num_parameters=sum(map(math.prod, tensor_shapes(config).values())),
            modified_at=rfc3339(datetime.fromtimestamp(written, UTC)),
            weight_bytes=_weight_bytes(model_dir),
        )

    @property
    def parameter_size(self) -> str:
        """The number of parameters as people say it, such as 134.52M."""
        for unit, suffix, digits in _SUFFIXES:
            if self.num_parameters >= unit:
                return f"{self.num_parameters / unit:.{digits}f}{suffix}"
        return str(self.num_parameters)

    def quantization_level(self, reported: Sequence[str]) -> str:
        """The type of the weights: what workers have rounded them to, else that of the files.

        `reported`: the fingerprint of the model as a worker reports it, and what has been done to it.
        """
        return next((_ROUNDED[name] for name in reported[1:2] if name in _ROUNDED), _LEVELS[self.config.dtype])

    def model_info(self) -> dict[str, str | int | float]:
        """The config under the names that GGUF files have for it."""
        config, family = self.config, self.config.model_type
        return {
            "general.architecture": family,
            "general.parameter_count": self.num_parameters,
            f"{family}.attention.head_count": config.num_heads,
            f"{family}.attention.head_count_kv": config.num_kv_heads,
            f"{family}.attention.key_length": config.head_dim,
            f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{family}.block_count": config.num_layers,
            f"{family}.context_length": config.max_context,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.feed_forward_length": config.intermediate_size,
            f"{family}.rope.freq_base": config.rope.theta,
            f"{family}.vocab_size": config.vocab_size,
        }


def _weight_bytes(model_dir: Path) -> int | None:
    try:
        return sum(path.stat().st_size for path in weight_files(model_dir))
    except (OSError, SetupError):
        return None
