"""Sizes of a model from its config: parameters, weights, KV per token, floating-point operations. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.tensors import tensor_shapes

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
_EMBEDDINGS = "model.embed_tokens.weight"
#: Bytes of a float16 weight that CPU kernels have packed (`kernels/cpu/src/pack.h`).
_PACKED_FLOAT16_BYTES = 4
#: Bytes of the scale of an output feature with int8 weights.
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """Settings of workers that sizes depend on."""

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    block_size: int = 16
    num_ranks: int = 1
    on_cpu: bool = False

    @property
    def packs_weights(self) -> bool:
        """Whether workers pack weights: CPU kernels do, but serve neither ranks nor 8-bit KV."""
        return self.on_cpu and self.num_ranks == 1 and self.kv_cache_dtype == "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes over all ranks of a worker."""

    num_parameters: int
    dtype: str
    kv_dtype: str
    weight_bytes: int
    #: Weights that one token's forward pass reads: all but the embeddings of other tokens.
    read_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_ranks: int
    #: Operations per token of a forward pass, and those per token and token of context.
    flops_per_token: int
    flops_per_token_and_context: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self.kv_bytes_per_token * self.block_size


def model_sizes(config: ModelConfig, options: SizeOptions) -> ModelSizes:
    """The sizes of a model. Raises `SetupError` when the ranks cannot share its heads."""
    if config.num_kv_heads % options.num_ranks:
        raise SetupError(
            f"--tensor-parallel-size {options.num_ranks} does not divide the model's {config.num_kv_heads} KV heads. "
            "Use a divisor."
        )
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    shapes = tensor_shapes(config)
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    unpacked = () if config.tie_word_embeddings else (_EMBEDDINGS,)
    weight_bytes = {
        name: _bytes_of(shape, name, dtype, options, is_packed=options.packs_weights and name not in unpacked)
        for name, shape in shapes.items()
    }
    embeddings = 0 if config.tie_word_embeddings else weight_bytes[_EMBEDDINGS]
    multiplied = sum(counts.values()) - (0 if config.tie_word_embeddings else counts[_EMBEDDINGS])
    heads = config.num_heads * config.head_dim
    return ModelSizes(
        num_parameters=sum(counts.values()),
        dtype=dtype,
        kv_dtype=kv_dtype,
        weight_bytes=sum(weight_bytes.values()),
        read_bytes=sum(weight_bytes.values()) - embeddings,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * _DTYPE_BYTES[kv_dtype],
        block_size=options.block_size,
        num_ranks=options.num_ranks,
        flops_per_token=2 * multiplied,
        flops_per_token_and_context=4 * config.num_layers * heads,
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
    )


def _bytes_of(shape: tuple[int, ...], name: str, dtype: str, options: SizeOptions, *, is_packed: bool) -> int:
    is_rounded = options.quantization == "int8" and len(shape) == 2 and name != _EMBEDDINGS
    if is_rounded:
        return math.prod(shape) + _SCALE_BYTES * shape[0]
    item_bytes = _PACKED_FLOAT16_BYTES if is_packed and dtype == "float16" else _DTYPE_BYTES[dtype]
    return math.prod(shape) * item_bytes
