"""Shards of a model: together they are the whole model, and each rank reads only its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kernels.decoder import DecoderWeights, LayerWeights
from kernels.split import even_slice
from pdserve.base.errors import SetupError
from pdserve.model import loader
from pdserve.model.config import ModelConfig
from pdserve.model.loader import load_decoder, load_weights
from pdserve.model.sharding import Shard, rank_config, tensor_shards
from pdserve.model.tensors import tensor_shapes
from pdserve.model.weights import assemble
from tests.unit.model.tiny import LLAMA, Second, random_tensors, save_model

#: 8 heads, 4 KV heads, all biases, and a vocabulary of 97.
BIASED: dict[str, object] = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 8} | {
    "attention_bias": True,
    "mlp_bias": True,
}
LAYER = "model.layers.1."


def config_of(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | BIASED | changes)


@pytest.mark.parametrize(("total", "size"), [(97, 2), (97, 3), (97, 4), (96, 4), (3, 4), (7, 1)])
def test_slices_are_adjacent_and_of_nearly_equal_size(total: int, size: int) -> None:
    slices = [even_slice(total, rank, size) for rank in range(size)]
    assert [index for each in slices for index in range(each.start, each.stop)] == list(range(total))
    widths = [each.stop - each.start for each in slices]
    assert sorted(widths, reverse=True) == widths
    assert widths[0] - widths[-1] <= 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_together_hold_every_element_once(size: int) -> None:
    config = config_of()
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in tensor_shapes(config).items()}
    for rank in range(size):
        for name, shard in tensor_shards(config, rank, size).items():
            counts[name][shard] += 1
    for name, count in counts.items():
        times = size if "norm" in name or "embed" in name else 1
        assert (count == times).all(), name


def test_a_rank_has_its_heads_its_inner_features_and_its_tokens() -> None:
    shards = tensor_shards(config_of(), 1, 4)
    all_of, heads, kv_heads, inner = slice(0, 64), slice(16, 32), slice(8, 16), slice(12, 24)
    of_layer = {name.removeprefix(LAYER): shard for name, shard in shards.items() if name.startswith(LAYER)}
    assert of_layer == {
        "input_layernorm.weight": (all_of,),
        "post_attention_layernorm.weight": (all_of,),
        "self_attn.q_proj.weight": (heads, all_of),
        "self_attn.q_proj.bias": (heads,),
        "self_attn.k_proj.weight": (kv_heads, all_of),
        "self_attn.k_proj.bias": (kv_heads,),
        "self_attn.v_proj.weight": (kv_heads, all_of),
        "self_attn.v_proj.bias": (kv_heads,),
        "self_attn.o_proj.weight": (all_of, heads),
        "mlp.gate_proj.weight": (inner, all_of),
        "mlp.gate_proj.bias": (inner,),
        "mlp.up_proj.weight": (inner, all_of),
        "mlp.up_proj.bias": (inner,),
        "mlp.down_proj.weight": (all_of, inner),
    }
    assert shards["lm_head.weight"] == (slice(25, 49), all_of)
    assert shards["model.embed_tokens.weight"] == (slice(0, 97), all_of)


def test_a_ranks_config_has_its_heads_and_the_models_hidden_size() -> None:
    config = config_of()
    expected = replace(config, num_heads=2, num_kv_heads=1, intermediate_size=12)
    assert rank_config(config, 4) == expected
    assert rank_config(config, 1) == config


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "num_attention_heads 8 and num_key_value_heads 4: .* Sizes that work: 1, 2, 4"),
        (8, {}, "num_key_value_heads 4: .*KV heads are not replicated. Sizes that work: 1, 2, 4"),
        (4, {"intermediate_size": 50}, "intermediate_size 50: .* Sizes that work: 1, 2"),
    ],
)
def test_the_error_for_a_model_that_does_not_divide_lists_the_sizes_that_work(
    tmp_path: Path, size: int, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(SetupError, match=rf"{size} ranks cannot split a model with {message}\."):
        rank_config(config_of(**changes), size)
    with pytest.raises(SetupError, match=message):
        load_weights(save_model(tmp_path, BIASED | changes), config_of(**changes), rank=0, size=size)


def tensors_of(weights: DecoderWeights) -> dict[str, Tensor]:
    layers = {
        f"{index}.{field.name}": getattr(layer, field.name)
        for index, layer in enumerate(weights.layers)
        for field in fields(LayerWeights)
    }
    whole = {name: getattr(weights, name) for name in ("embedding", "norm", "lm_head")}
    return {name: tensor for name, tensor in (whole | layers).items() if tensor is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_loads_slices_of_the_whole_tensors(tmp_path: Path, rank: int, tied: bool) -> None:
    config = config_of(tie_word_embeddings=tied)
    tensors, shards = random_tensors(config), tensor_shards(config, rank, 4)
    expected = tensors_of(assemble(config, lambda name: tensors[name][shards[name]], rank=rank, size=4))
    loaded = tensors_of(
        load_weights(save_model(tmp_path, BIASED | {"tie_word_embeddings": tied}), config, rank=rank, size=4)
    )
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.is_contiguous(), name
    assert ("0.output_bias" in loaded, "0.down_bias" in loaded) == (rank == 0, rank == 0)
    assert len(loaded["lm_head"]) == (25 if rank == 0 else 24)


def test_the_lm_head_of_a_tied_embedding_is_a_view(tmp_path: Path) -> None:
    changes: dict[str, object] = BIASED | {"tie_word_embeddings": True}
    weights = load_weights(save_model(tmp_path, changes), config_of(tie_word_embeddings=True), rank=1, size=2)
    assert torch.equal(weights.lm_head, weights.embedding[49:])
    assert weights.lm_head.untyped_storage().data_ptr() == weights.embedding.untyped_storage().data_ptr()


class CountingFile:
    """A safetensors file that counts the elements read of each tensor."""

    def __init__(self, file: safe_open, num_read: dict[str, int]) -> None:
        self._file = file
        self._num_read = num_read

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        return self._count(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self, name, self._file.get_slice(name))

    def _count(self, name: str, tensor: Tensor) -> Tensor:
        self._num_read[name] = self._num_read.get(name, 0) + tensor.numel()
        return tensor


class CountingSlice:
    def __init__(self, file: CountingFile, name: str, view: object) -> None:
        self._file, self._name, self._view = file, name, view
        self.get_dtype, self.get_shape = view.get_dtype, view.get_shape

    def __getitem__(self, shard: Shard) -> Tensor:
        return self._file._count(self._name, self._view[shard])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_only_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    num_read: dict[str, int] = {}

    @contextmanager
    def counting(path: Path, **options: str) -> Iterator[CountingFile]:
        with safe_open(path, **options) as file:
            yield CountingFile(file, num_read)

    monkeypatch.setattr(loader, "safe_open", counting)
    config = config_of()
    load_weights(save_model(tmp_path, BIASED), config, rank=rank, size=2)
    assert num_read == {
        name: math.prod(each.stop - each.start for each in shard)
        for name, shard in tensor_shards(config, rank, 2).items()
    }


def test_row_shards_stay_mapped(tmp_path: Path) -> None:
    path = save_model(tmp_path, BIASED) / "model.safetensors"
    weights = load_weights(tmp_path, config_of(), rank=1, size=2)
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [tuple(int(end, 16) for end in entry.split("-")) for entry in mapped]
    for tensor in (weights.lm_head, weights.layers[0].q, weights.layers[1].up, weights.norm):
        assert any(start <= tensor.data_ptr() < end for start, end in ranges), "the tensor is a copy"


def test_a_decoder_on_a_rank_has_its_config(tmp_path: Path) -> None:
    decoder = load_decoder(save_model(tmp_path, BIASED), ranks=Second())
    assert decoder.config == rank_config(config_of(), 2)
    whole = load_decoder(tmp_path)
    assert decoder.weight_bytes < 0.51 * whole.weight_bytes
