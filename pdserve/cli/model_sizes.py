"""Sizes of a model from its config: parameters, weights, KV per token, floating-point operations. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.tensors import tensor_shapes

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
_EMBEDDINGS = "model.embed_tokens.weight"
#: Bytes of a weight that CPU kernels have packed (`kernels/cpu/src/pack.h`), in all dtypes but bfloat16.
_PACKED_BYTES = 4
#: Instruction sets whose kernels read bfloat16 weights of 12 bits, and others, which read all 16.
_CODED, _CODED_BYTES, _PLAIN_BYTES = frozenset(("avx512", "avx512_bf16")), 1.5, 2.0
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
    #: Instruction set of the CPU kernels that pack the weights, such as "avx512"; None: the weights are not packed.
    packed_for: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes over all ranks of a worker."""

    num_parameters: int
    dtype: str
    kv_dtype: str
    weight_bytes: int
    #: Those that a CPU worker has for itself; the others it shares with the workers that map the same file.
    private_weight_bytes: int
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
    weight_bytes = {name: _tensor_bytes(name, shape, dtype, options, config) for name, shape in shapes.items()}
    embeddings = 0 if config.tie_word_embeddings else weight_bytes[_EMBEDDINGS]
    multiplied = sum(counts.values()) - (0 if config.tie_word_embeddings else counts[_EMBEDDINGS])
    heads = config.num_heads * config.head_dim
    return ModelSizes(
        num_parameters=sum(counts.values()),
        dtype=dtype,
        kv_dtype=kv_dtype,
        weight_bytes=sum(weight_bytes.values()),
        private_weight_bytes=_private_bytes(config, weight_bytes, counts[_EMBEDDINGS], dtype, options),
        read_bytes=sum(weight_bytes.values()) - embeddings,
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * _DTYPE_BYTES[kv_dtype],
        block_size=options.block_size,
        num_ranks=options.num_ranks,
        flops_per_token=2 * multiplied,
        flops_per_token_and_context=4 * config.num_layers * heads,
        max_model_len=config.default_context,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
    )


def _private_bytes(
    config: ModelConfig, weight_bytes: Mapping[str, int], num_embeddings: int, dtype: str, options: SizeOptions
) -> int:
    is_converted = dtype != config.dtype
    if options.packed_for is None:
        return sum(weight_bytes.values()) if is_converted else 0
    packed = sum(size for name, size in weight_bytes.items() if _is_packed(name, config))
    # Rows of the embeddings are read from the mapped file, or from a copy of another dtype.
    return packed + (num_embeddings * _DTYPE_BYTES[dtype] if is_converted else 0)


def packed_item_bytes(dtype: str, instruction_set: str) -> float:
    """Bytes of a packed weight that is not rounded to int8."""
    if dtype != "bfloat16":
        return _PACKED_BYTES
    return _CODED_BYTES if instruction_set in _CODED else _PLAIN_BYTES


def _tensor_bytes(name: str, shape: tuple[int, ...], dtype: str, options: SizeOptions, config: ModelConfig) -> int:
    if options.quantization == "int8" and _is_packed(name, config) and len(shape) == 2:
        return math.prod(shape) + _SCALE_BYTES * shape[0]
    if options.packed_for is None or not _is_packed(name, config):
        return math.prod(shape) * _DTYPE_BYTES[dtype]
    return int(math.prod(shape) * packed_item_bytes(dtype, options.packed_for))


def _is_packed(name: str, config: ModelConfig) -> bool:
    """Whether CPU kernels pack this tensor: all but embeddings that are not the output matrix as well."""
    return config.tie_word_embeddings or name != _EMBEDDINGS
