"""Loads a Hugging Face model directory: maps safetensors into memory, checks them, and makes a decoder of them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
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
from pdserve.model.device_weights import read_to_device
from pdserve.model.sharding import Shard, rank_config, tensor_shards
from pdserve.model.stored_tensors import ITEM_BYTES, StoredTensor, stored_tensors
from pdserve.model.tensors import check_tensors
from pdserve.model.weights import assemble

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, shard: Shard) -> Tensor: ...


class TensorFile(Protocol):
    """The methods used of `safetensors.safe_open`, which has no type hints."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


#: What names start with in a checkpoint of a whole model.
_BASE = "model."


def _is_base_model(names: Container[str]) -> bool:
    return "embed_tokens.weight" in names


class _BaseModelFile:
    """A file of a checkpoint that was saved without a head, as those of embedding models are."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def keys(self) -> list[str]:
        return [_BASE + name for name in self._file.keys()]  # noqa: SIM118 - it is no mapping

    def get_slice(self, name: str) -> _Slice:
        return self._file.get_slice(name.removeprefix(_BASE))

    def get_tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name.removeprefix(_BASE))


def load_decoder(
    model_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    kernels: KernelOptions | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """The decoder of a model directory, or the shard of it that one of several ranks computes.

    `dtype` "auto" is that of its config. Raises `SetupError` for a model, dtype, choice of kernels or number of ranks
    that is not supported, and for weights that do not match the config.
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
    """Binds kernels to loaded weights. With several ranks, these are a shard of the model that `config` describes.

    Raises `SetupError` for kernels that are not available.
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
    """The weights of a model directory. Of tensors that `size` ranks split, only this rank's shards are read.

    On the CPU, tensors stored in that dtype stay in the page cache, where all processes share them; others are copies.
    On another device they are `pdserve.model.device_weights`. Raises `SetupError` like `load_decoder`, and when the
    ranks cannot split the model.
    """
    torch_dtype = _TORCH_DTYPES[_dtype(config, dtype)]
    shards, stored = tensor_shards(config, rank, size), _checked_tensors(model_dir, config)
    if device != "cpu":
        tensors = _read_to_device(model_dir, stored, shards, torch_dtype, torch.device(device))
        return assemble(config, tensors.__getitem__, rank=rank, size=size)
    with open_checkpoint(model_dir) as file_of:

        def get(tensor: str) -> Tensor:
            return _read(file_of[tensor], tensor, shards[tensor]).to(dtype=torch_dtype)

        return assemble(config, get, rank=rank, size=size)


def _checked_tensors(model_dir: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Where each tensor is stored. Raises `SetupError` for tensors that the config does not describe."""
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(model_dir):
        try:
            stored |= stored_tensors(path)
        except OSError as error:
            raise SetupError(f"Cannot read {path}: {error.strerror}.") from error
    if _is_base_model(stored):
        stored = {_BASE + name: tensor for name, tensor in stored.items()}
    for name, tensor in stored.items():
        if tensor.dtype not in ITEM_BYTES:
            supported = ", ".join(ITEM_BYTES)
            raise SetupError(f"{name} has type {tensor.dtype}, which is not supported; supported: {supported}.")
    check_tensors(config, {name: tensor.shape for name, tensor in stored.items()}, str(model_dir))
    return stored


def _read_to_device(
    model_dir: Path,
    stored: Mapping[str, StoredTensor],
    shards: Mapping[str, Shard],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    try:
        return read_to_device(stored, shards, dtype, device)
    except torch.OutOfMemoryError as error:
        needed = _num_elements(shards) * dtype.itemsize
        free, total = torch.cuda.mem_get_info(device)
        raise SetupError(
            f"The weights of {model_dir} do not fit on {device}: they need {needed / 2**30:.2f} GiB in "
            f"{str(dtype).removeprefix('torch.')}, and {free / 2**30:.2f} of {total / 2**30:.2f} GiB were free when "
            "loading failed. Use a larger GPU or a smaller model, or stop other programs on the GPU."
        ) from error


def memory_of_weights(config: ModelConfig, *, dtype: str, kernels: KernelOptions, ranks: Ranks = ALONE) -> int:
    """Approximate host memory, in bytes, for copies of the weights of all ranks: packed, or of another dtype.

    Weights used directly from the mapped file do not count. Raises `SetupError` like `load_decoder`.
    """
    name = _dtype(config, dtype)
    torch_dtype = _TORCH_DTYPES[name]
    packed = packed_bytes(kernels, decoder_shape(rank_config(config, ranks.size)), torch_dtype, ranks)
    if name == config.dtype:
        return packed
    if packed:  # After packing, the embedding is the only converted tensor that stays.
        return packed + config.vocab_size * config.hidden_size * torch_dtype.itemsize
    return _num_elements(tensor_shards(config, ranks.rank, ranks.size)) * torch_dtype.itemsize * ranks.size


def _dtype(config: ModelConfig, dtype: str) -> str:
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise SetupError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}.")
    return name


def _read(file: TensorFile, name: str, shard: Shard) -> Tensor:
    """Reads a shard. Rows remain views of the mapped file; columns are copied."""
    view = file.get_slice(name)
    if all(each == slice(0, length) for each, length in zip(shard, view.get_shape(), strict=True)):
        return file.get_tensor(name)
    return view[shard].contiguous()


def _num_elements(shards: Mapping[str, Shard]) -> int:
    return sum(math.prod(each.stop - each.start for each in shard) for shard in shards.values())


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[dict[str, TensorFile]]:
    """Maps tensor names to their files, which are open within the context. Raises `SetupError`."""
    with ExitStack() as stack:
        file_of: dict[str, TensorFile] = {}
        for path in weight_files(model_dir):
            try:
                file = cast(TensorFile, stack.enter_context(safe_open(path, framework="pt")))
            except (SafetensorError, OSError) as error:
                raise SetupError(f"{path} is not a readable safetensors file: {error}.") from error
            file_of |= dict.fromkeys(file.keys(), file)
        if _is_base_model(file_of):
            file_of = {_BASE + name: _BaseModelFile(file) for name, file in file_of.items()}
        yield file_of
