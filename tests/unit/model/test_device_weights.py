"""Weights on a GPU: the bits of the files, in one allocation, read through few pinned bytes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decoder import DecoderWeights, LayerWeights
from kernels.triton.decoder import joined
from pdserve.base.errors import SetupError
from pdserve.model import device_weights
from pdserve.model.config import ModelConfig
from pdserve.model.device_weights import plan_arena
from pdserve.model.loader import load_weights
from pdserve.model.sharding import tensor_shards
from pdserve.model.stored_tensors import ITEM_BYTES
from tests.support.deadline import DEADLINE_S
from tests.support.devices import gpu_only
from tests.unit.model.tiny import LLAMA, save_model

#: 8 heads, 4 KV heads, all biases.
BIASED: dict[str, object] = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 8} | {
    "attention_bias": True,
    "mlp_bias": True,
}
CONFIG = ModelConfig.from_hf(LLAMA | BIASED)
#: Bytes of a buffer: far fewer than most tensors have, and no multiple of their rows.
SMALL = 1000


def tensors_of(weights: DecoderWeights) -> Iterator[tuple[str, Tensor]]:
    for name in ("embedding", "norm", "lm_head"):
        yield name, getattr(weights, name)
    for index, layer in enumerate(weights.layers):
        for field in fields(LayerWeights):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                yield f"{index}.{field.name}", tensor


def test_each_shard_has_its_share_of_the_allocation_and_what_is_multiplied_together_adjoins() -> None:
    shards = tensor_shards(CONFIG, 1, 2)
    positions, length = plan_arena(shards, alignment=256)
    sizes = {name: torch.Size(each.stop - each.start for each in shard).numel() for name, shard in shards.items()}
    ranges = sorted((at, at + sizes[name]) for name, at in positions.items())
    assert positions.keys() == shards.keys()
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert ranges[-1][1] == length
    for kind in ("weight", "bias"):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            names = [f"model.layers.1.{module}.{kind}" for module in group]
            assert positions[names[0]] % 256 == 0
            for name, following in pairwise(names):
                assert positions[following] == positions[name] + sizes[name]


def test_each_dtype_of_a_file_can_be_read() -> None:
    assert {name: dtype.itemsize for name, dtype in device_weights._DTYPES.items()} == ITEM_BYTES


class TestOnHardware:
    """What copies to a GPU."""

    pytestmark = gpu_only

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(
        ("stored", "dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "auto")]
    )
    def test_a_gpu_has_the_bits_that_a_cpu_has(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, dtype: str, tied: bool, size: int, rank: int
    ) -> None:
        if rank >= size:
            pytest.skip("there is no such rank")
        monkeypatch.setattr(device_weights, "_BUFFER_BYTES", SMALL)
        changes = BIASED | {"tie_word_embeddings": tied, "torch_dtype": stored}
        path, config = save_model(tmp_path, changes, getattr(torch, stored)), ModelConfig.from_hf(LLAMA | changes)
        expected = dict(tensors_of(load_weights(path, config, dtype=dtype, rank=rank, size=size)))
        loaded = load_weights(path, config, dtype=dtype, device="cuda", rank=rank, size=size)
        found = dict(tensors_of(loaded))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert (tensor.dtype, tensor.device.type) == (expected[name].dtype, "cuda")
            assert tensor.is_contiguous()
            assert torch.equal(tensor.cpu(), expected[name]), name
        # No copies for kernels that multiply by several matrices at once.
        for layer in loaded.layers:
            assert joined(layer.q, layer.k, layer.v).data_ptr() == layer.q.data_ptr()
            assert joined(layer.gate, layer.up).data_ptr() == layer.gate.data_ptr()

    def test_loading_takes_no_more_memory_than_the_weights(self, tmp_path: Path) -> None:
        path = save_model(tmp_path, BIASED)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weights = load_weights(path, CONFIG, device="cuda")
        _, length = plan_arena(tensor_shards(CONFIG, 0, 1), alignment=128)
        assert torch.cuda.max_memory_allocated() - before <= length * 4 + 511
        del weights

    def test_all_readers_end_with_the_first_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_weights, "_BUFFER_BYTES", SMALL)
        path, preadv, calls = save_model(tmp_path, BIASED), os.preadv, list[int]()
        drained, numbers = threading.Event(), count()

        def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(descriptor)
            if next(numbers) == 0:
                raise OSError(5, "Input/output error")
            assert drained.wait(DEADLINE_S), "the reader that failed leaves all pieces to the others"
            return preadv(descriptor, buffers, offset)

        def draining(pieces: Iterator[object], maxlen: int) -> None:
            deque(pieces, maxlen)
            drained.set()

        monkeypatch.setattr(os, "preadv", failing)
        monkeypatch.setattr(device_weights, "deque", draining)
        with pytest.raises(SetupError, match=r"Cannot read .*model\.safetensors: Input/output error\."):
            load_weights(path, CONFIG, device="cuda")
        assert len(calls) <= device_weights._READERS
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(calls[0])

    def test_reads_may_be_short_and_a_file_that_became_shorter_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, preadv = save_model(tmp_path, BIASED), os.preadv
        expected = dict(tensors_of(load_weights(path, CONFIG)))

        def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            return preadv(descriptor, [buffers[0][:777]], offset)

        monkeypatch.setattr(os, "preadv", short)
        for name, tensor in tensors_of(load_weights(path, CONFIG, device="cuda")):
            assert torch.equal(tensor.cpu(), expected[name]), name
        monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 0)
        with pytest.raises(SetupError, match=r"model\.safetensors became shorter while it was read"):
            load_weights(path, CONFIG, device="cuda")

    def test_a_file_that_is_replaced_behind_its_header_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = save_model(tmp_path, BIASED)

        def replaced(*arguments: Any) -> dict[str, Tensor]:
            copy = path / "copy"
            copy.write_bytes((path / "model.safetensors").read_bytes())
            copy.replace(path / "model.safetensors")
            return device_weights.read_to_device(*arguments)

        monkeypatch.setattr("pdserve.model.loader.read_to_device", replaced)
        with pytest.raises(SetupError, match=r"model\.safetensors was replaced while it was read"):
            load_weights(path, CONFIG, device="cuda")

    def test_weights_that_do_not_fit_are_an_error_with_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = save_model(tmp_path, BIASED)

        def full(*_: object, **__: object) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr("pdserve.model.loader.read_to_device", full)
        with pytest.raises(SetupError, match=r"do not fit on cuda: they need 0\.00 GiB in float32, and .* were free"):
            load_weights(path, CONFIG, device="cuda")
