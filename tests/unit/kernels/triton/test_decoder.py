"""The whole forward pass against the reference, for all four model families."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.depth import IS_FULL
from tests.support.devices import DEVICE, SIMULATED, gpu_only

pytest.importorskip("triton")

import triton
from triton.runtime.interpreter import GridExecutor

from kernels.choice import Backend, KernelOptions
from kernels.triton.decoder import joined
from kernels.triton.ops import TritonOps
from pdserve.model.decoder import Decoder
from tests.golden.paged import PagedRunner
from tests.property.model.plans import Placement, compute
from tests.property.model.same import assert_close
from tests.property.model.tiny_models import Fields, make_decoder
from tests.support.backends import REFERENCE
from tests.unit.kernels.combinations import combinations

#: Relative to the largest value; doubled for bfloat16, which the interpreter truncates and hardware rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 4e-3}
FAMILIES: dict[str, Fields] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}


def fields_of(family: str) -> Fields:
    return {
        "model_type": family,
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | FAMILIES[family]


def decoders(family: str, dtype: torch.dtype, *, deterministic: bool = True) -> tuple[Decoder, Decoder]:
    options = KernelOptions(backend=Backend.TRITON, deterministic=deterministic)
    fields = fields_of(family)
    return make_decoder(fields, options, dtype, device=DEVICE), make_decoder(fields, REFERENCE, dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*combinations(list(FAMILIES), [torch.float32, torch.bfloat16]), ("qwen3", torch.float16)],
    ids=str,
)
def test_prompts_chunks_and_single_rows_match_the_reference(family: str, dtype: torch.dtype) -> None:
    texts = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8]]
    plan = [[(0, 4)], [(1, 3), (0, 1)], [(0, 1), (1, 1)]]
    ours, expected = (compute(decoder, texts, plan, Placement(block_size=4)) for decoder in decoders(family, dtype))
    assert_close(ours, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fast_mode_matches_the_reference(family: str) -> None:
    ours, expected = (
        compute(decoder, [[3, 1, 4, 1, 5]], [[(0, 4)], [(0, 1)]], Placement(block_size=4), every_row=True)
        for decoder in decoders(family, torch.float32, deterministic=False)
    )
    assert_close(ours, expected, 1e-5)


def test_an_fp8_kv_cache_matches_the_reference() -> None:
    scales, logits = torch.tensor([[[0.5, 0.25], [1.0, 0.125]]] * 2), []
    for backend in (Backend.TRITON, Backend.REFERENCE):
        options = KernelOptions(backend=backend, kv_scales=scales)
        decoder = make_decoder(fields_of("qwen3"), options, torch.float32, device=DEVICE)
        runner = PagedRunner(decoder, num_blocks=4, block_size=4, kv_dtype=torch.float8_e4m3fn)
        sequence = runner.add_sequence()
        steps = ([3, 1, 4, 1], [5], [9])
        logits.append(torch.cat([runner.step([(sequence, tokens)], last_only=False) for tokens in steps]))
    # Rounding one number of a key to the other neighbour changes it by a sixteenth.
    torch.testing.assert_close(*logits, atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_states_match_the_reference_whichever_rows_are_requested(dtype: torch.dtype) -> None:
    found = []
    for decoder in decoders("qwen3", dtype):
        runner = PagedRunner(decoder, num_blocks=4, block_size=4)
        sequences = [(runner.add_sequence(), [5, 6, 7]), (runner.add_sequence(), [8, 9])]
        batch = replace(runner.make_batch(sequences, last_only=False), hidden_only=True)
        every = decoder.forward(batch, runner.kv_cache)
        assert (every.dtype, every.shape) == (torch.float32, (5, 40))
        wanted = torch.tensor([1, 4], device=DEVICE)
        torch.testing.assert_close(decoder.forward(replace(batch, logits_rows=wanted), runner.kv_cache), every[wanted])
        assert decoder.forward(replace(batch, logits_rows=wanted[:0]), runner.kv_cache).shape == (0, 40)
        found.append(every)
    torch.testing.assert_close(*found, atol=float(TOLERANCE[dtype] * found[1].abs().max()), rtol=0)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts launches of the interpreter")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gated_products_take_a_launch_less_in_each_layer_and_change_no_bit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: Counter[bool] = Counter()
    launch, found = GridExecutor.__call__, []
    for has_gated_products in (False, True):

        def counted(*args: Any, has_gated_products: bool = has_gated_products, **kwargs: Any) -> None:
            launches[has_gated_products] += 1
            launch(*args, **kwargs)

        decoder, _ = decoders(family, torch.bfloat16)
        kernel: Any = decoder._kernel
        kernel._ops = TritonOps(deterministic=True, gated_products=has_gated_products)
        runner = PagedRunner(decoder, num_blocks=4, block_size=4)
        monkeypatch.setattr(GridExecutor, "__call__", counted)
        found.append(runner.step([(runner.add_sequence(), [5, 6, 7])], last_only=False))
        monkeypatch.setattr(GridExecutor, "__call__", launch)
    assert torch.equal(*found)
    assert launches[False] - launches[True] == decoder.config.num_layers


def test_logits_come_in_the_requested_order_and_may_repeat() -> None:
    decoder, _ = decoders("llama", torch.float32)
    runner = PagedRunner(decoder, num_blocks=4, block_size=4)
    batch = runner.make_batch([(runner.add_sequence(), [5, 6, 7]), (runner.add_sequence(), [8, 9])], last_only=False)
    every = decoder.forward(batch, runner.kv_cache)
    wanted = torch.tensor([4, 0, 4, 2], device=DEVICE)
    some = decoder.forward(replace(batch, logits_rows=wanted), runner.kv_cache)
    assert every.dtype == torch.float32
    assert torch.equal(some, every[wanted])
    assert decoder.forward(replace(batch, logits_rows=wanted[:0]), runner.kv_cache).shape == (0, 97)


def test_a_chunk_without_wanted_logits_is_written_to_every_layer() -> None:
    decoder, _ = decoders("qwen3", torch.float32)
    texts, placement = [[3, 1, 4, 1, 5]], Placement(block_size=4)
    silent = compute(decoder, texts, [[(0, 4)], [(0, 1)]], placement)
    every = compute(decoder, texts, [[(0, 4)], [(0, 1)]], placement, every_row=True)
    assert torch.equal(silent[0].kv, every[0].kv)
    assert silent[0].kv.isfinite().all()


def test_the_listener_is_called_after_the_kv_writes_of_each_layer_are_launched() -> None:
    decoder, _ = decoders("llama", torch.float32)
    runner = PagedRunner(decoder, num_blocks=4, block_size=4)
    runner.kv_cache.zero_()
    batch = runner.make_batch([(runner.add_sequence(), [5, 6, 7, 8, 9])])
    seen: list[torch.Tensor] = []

    def on_layer(num_layers: int) -> None:
        assert num_layers == len(seen) + 1
        # Launched after the reported writes.
        seen.append(runner.kv_cache.clone())

    logits = decoder.forward(batch, runner.kv_cache, on_layer)
    assert len(seen) == 2
    assert not seen[0][:, 1].any()
    assert torch.equal(seen[0][:, 0], runner.kv_cache[:, 0])
    assert torch.equal(seen[1], runner.kv_cache)
    assert torch.equal(logits, decoder.forward(batch, runner.kv_cache))


def test_a_decoder_reports_its_backend_and_no_thread_counters() -> None:
    decoder, other = decoders("qwen2", torch.bfloat16)
    assert (decoder.kernels.backend, decoder.kernels.mode, decoder.kernels.reason) == (
        Backend.TRITON,
        "deterministic",
        "",
    )
    assert decoder.weight_bytes == other.weight_bytes
    assert decoder.thread_counters is None


def test_adjacent_tensors_of_one_storage_are_joined_without_a_copy() -> None:
    storage = torch.arange(60.0).view(10, 6)
    tensors = storage[1:4], storage[4:5], storage[5:9]
    whole = joined(*tensors)
    assert torch.equal(whole, storage[1:9])
    assert whole.data_ptr() == tensors[0].data_ptr()
    assert joined(storage[0], storage[1]).data_ptr() == storage.data_ptr()


def test_tensors_that_are_not_adjacent_and_in_order_are_copied() -> None:
    storage = torch.arange(60.0).view(10, 6)
    for tensors in (
        (storage[4:6], storage[0:4]),
        (storage[0:4], storage[5:6]),
        (storage[0:4], storage[4:6].clone()),
        (storage[0:4, :3], storage[4:6, :3]),
        (storage[0:4:2], storage[4:6]),
    ):
        whole = joined(*tensors)
        assert torch.equal(whole, torch.cat(tensors))
        assert whole.data_ptr() != tensors[0].data_ptr()


class TestOnHardware:
    """CUDA graphs, which the interpreter does not have."""

    pytestmark = gpu_only

    @pytest.mark.parametrize("deterministic", [False, True] if IS_FULL or not SIMULATED else [True])
    def test_a_graph_of_the_forward_pass_computes_the_same(self, deterministic: bool) -> None:
        decoder, _ = decoders("qwen3", torch.bfloat16, deterministic=deterministic)
        runner = PagedRunner(decoder, num_blocks=8, block_size=4)
        sequences = [runner.add_sequence(), runner.add_sequence()]
        runner.step([(sequences[0], [5, 6, 7]), (sequences[1], [8, 9, 10, 11, 12])])
        batch = runner.make_batch([(sequences[0], [1]), (sequences[1], [2])])
        decoder.forward(batch, runner.kv_cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decoder.forward(batch, runner.kv_cache)
        for tokens in ([3, 4], [90, 17]):
            batch.token_ids.copy_(torch.tensor(tokens))
            expected = decoder.forward(batch, runner.kv_cache).clone()
            with torch.inference_mode():
                captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)
