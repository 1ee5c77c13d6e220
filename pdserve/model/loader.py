"""Opens a Hugging Face model directory: safetensors mapped into memory, checked against the config, made a decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.choice import KernelOptions, KernelsUnavailable, packed_bytes
from kernels.decoder import ALONE, DecoderWeights, Ranks
from pdserve.base.errors import SetupError
from pdserve.model.checkpoint import weight_files
from pdserve.model.config import DTYPES, ModelConfig
from pdserve.model.decoder import Decoder, decoder_shape
from pdserve.model.sharding import Shard, rank_config, tensor_shards
from pdserve.model.tensors import Shape, check_tensors
from pdserve.model.weights import assemble

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: As safetensors names them. Anything else (int8, fp8) means a quantized checkpoint.
_FLOATS = ("F64", "F32", "BF16", "F16")


class _Slice(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, part: Shard) -> Tensor: ...


class TensorFile(Protocol):
    """What is used of `safetensors.safe_open`, which has no type hints."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


def load_decoder(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    kernels: KernelOptions | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """The decoder of a model directory, or the part of it that one of several ranks computes.

    `dtype` "auto" is that of its config. Raises `SetupError` for a model, dtype, choice of kernels or number of ranks
    that is not supported, and for weights that do not fit the config.
    """
    config = ModelConfig.from_dir(model_dir)
    weights = load_weights(model_dir, config, dtype=dtype, device=device, rank=ranks.rank, size=ranks.size)
    return make_decoder(config, weights, max_model_len=max_model_len, kernels=kernels, ranks=ranks)


def make_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    *,
    max_model_len: int | None = None,
    kernels: KernelOptions | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """Binds kernels to weights that were loaded, which on several ranks are a part of what `config` describes.

    Raises `SetupError` for a choice that cannot be had.
    """
    own = rank_config(config, ranks.size)
    try:
        return Decoder(own, weights, max_model_len=max_model_len, kernels=kernels, ranks=ranks)
    except KernelsUnavailable as error:
        raise SetupError(str(error)) from error


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    rank: int = 0,
    size: int = 1,
) -> DecoderWeights:
    """The weights of a model directory; of the tensors that `size` ranks split, no more is read than one rank's part.

    On the CPU, tensors stored in that dtype stay in the page cache, where all processes share them; others are copies.
    On another device each is read straight into its memory, and matrices that are multiplied together lie side by side.
    Raises `SetupError` like `load_decoder`, and when the ranks cannot split the model.
    """
    name = _dtype(config, dtype)
    parts = tensor_shards(config, rank, size)
    with open_checkpoint(model_dir, device) as where:
        check_tensors(config, dict(_shapes(where)), str(model_dir))

        def get(tensor: str) -> Tensor:
            return _read(where[tensor], tensor, parts[tensor]).to(dtype=_TORCH_DTYPES[name])

        try:
            return assemble(config, get, side_by_side=device != "cpu", rank=rank, size=size)
        except torch.OutOfMemoryError as error:
            needed = _num_elements(parts) * _TORCH_DTYPES[name].itemsize
            free, total = torch.cuda.mem_get_info(device)
            raise SetupError(
                f"The weights of {model_dir} need {needed / 2**30:.2f} GiB in {name}, and of {device}'s "
                f"{total / 2**30:.2f} GiB {free / 2**30:.2f} were left when they did not fit. Use a larger GPU, a "
                "smaller model, or end what else uses it."
            ) from error


def memory_of_weights(config: ModelConfig, *, dtype: str, kernels: KernelOptions, ranks: Ranks = ALONE) -> int:
    """Bytes of a CPU's memory that the weights of all ranks will take, nearly: copies, packed or of another dtype.

    What is computed with where its file is mapped counts nothing. Raises `SetupError` like `load_decoder`.
    """
    name = _dtype(config, dtype)
    wanted = _TORCH_DTYPES[name]
    packed = packed_bytes(kernels, decoder_shape(rank_config(config, ranks.size)), wanted, ranks)
    if name == config.dtype:
        return packed
    if packed:  # Of what was converted, the embedding alone stays.
        return packed + config.vocab_size * config.hidden_size * wanted.itemsize
    return _num_elements(tensor_shards(config, ranks.rank, ranks.size)) * wanted.itemsize * ranks.size


def _dtype(config: ModelConfig, dtype: str) -> str:
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise SetupError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}.")
    return name


def _read(file: TensorFile, name: str, part: Shard) -> Tensor:
    """Rows stay where the file is mapped; columns become a matrix of their own."""
    view = file.get_slice(name)
    if all(one == slice(0, length) for one, length in zip(part, view.get_shape(), strict=True)):
        return file.get_tensor(name)
    return view[part].contiguous()


def _num_elements(parts: Mapping[str, Shard]) -> int:
    return sum(math.prod(one.stop - one.start for one in part) for part in parts.values())


@contextmanager
def open_checkpoint(model_dir: Path, device: str = "cpu") -> Iterator[dict[str, TensorFile]]:
    """Each tensor's name with the file that has it, as long as they are open. Raises `SetupError`."""
    with ExitStack() as stack:
        where: dict[str, TensorFile] = {}
        for path in weight_files(model_dir):
            try:
                file = cast(TensorFile, stack.enter_context(safe_open(path, framework="pt", device=device)))
            except (SafetensorError, OSError) as error:
                raise SetupError(f"{path} is not a readable safetensors file: {error}.") from error
            where |= dict.fromkeys(file.keys(), file)
        yield where


def _shapes(where: Mapping[str, TensorFile]) -> Iterator[tuple[str, Shape]]:
    for name, file in where.items():
        view = file.get_slice(name)
        if view.get_dtype() not in _FLOATS:
            supported = ", ".join(_FLOATS)
            raise SetupError(f"{name} has type {view.get_dtype()}, which is not supported; supported: {supported}.")
        yield name, tuple(view.get_shape())
