"""A sequence's logits do not depend on how its rows are batched, chunked and stored."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.choice import Backend, KernelOptions, instruction_sets
from kernels.decoder import PassInterrupted
from pdserve.model.decoder import Decoder
from pdserve.model.loader import load_decoder
from tests.golden.paged import PagedRunner
from tests.unit.model.tiny import save_model

TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(3)).tolist()
WINDOW = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 11}


@pytest.fixture(scope="module", params=[{}, WINDOW], ids=["full", "window"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(save_model(tmp_path_factory.mktemp("model"), request.param))


def logits_in_chunks(decoder: Decoder, chunks: Sequence[int], *, block_size: int = 16, seed: int = 0) -> Tensor:
    runner = PagedRunner(decoder, num_blocks=80, block_size=block_size, seed=seed)
    sequence, start, rows = runner.add_sequence(), 0, []
    for chunk in chunks:
        rows.append(runner.step([(sequence, TOKENS[start : start + chunk])], last_only=False))
        start += chunk
    assert start == len(TOKENS)
    return torch.cat(rows)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 60, [16, 16, 16, 12], [7, 1, 30, 22], [59, 1]])
def test_chunking_does_not_change_the_logits(decoder: Decoder, chunks: list[int]) -> None:
    assert_close(logits_in_chunks(decoder, chunks), logits_in_chunks(decoder, [60]))


@pytest.mark.parametrize(("block_size", "seed"), [(1, 0), (4, 1), (16, 2), (64, 3)])
def test_location_and_size_of_blocks_do_not_change_the_logits(decoder: Decoder, block_size: int, seed: int) -> None:
    assert_close(logits_in_chunks(decoder, [23, 37], block_size=block_size, seed=seed), logits_in_chunks(decoder, [60]))


def test_other_sequences_in_the_batch_do_not_change_the_logits(decoder: Decoder) -> None:
    alone = logits_in_chunks(decoder, [60])
    runner = PagedRunner(decoder, num_blocks=60)
    watched, long, chunked = (runner.add_sequence() for _ in range(3))
    runner.step([(long, TOKENS[::-1] * 3)])
    first = runner.step([(long, [5]), (watched, TOKENS[:40]), (chunked, TOKENS[10:30])])
    steps = [first[1]]
    for position in range(40, 60):
        rows = runner.step([(chunked, [1, 2, 3]), (watched, [TOKENS[position]]), (long, [position])])
        steps.append(rows[1])
    assert_close(torch.stack(steps), alone[39:])


def test_logits_are_those_of_the_requested_rows_in_their_order(decoder: Decoder) -> None:
    runner = PagedRunner(decoder, num_blocks=8)
    all_rows = runner.step([(runner.add_sequence(), TOKENS[:20])], last_only=False)
    other = PagedRunner(decoder, num_blocks=8)
    batch = other.make_batch([(other.add_sequence(), TOKENS[:20])])
    for rows in ([], [19], [4, 0, 4]):
        requested = type(batch)(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            logits_rows=torch.tensor(rows, dtype=torch.int64),
        )
        logits = decoder.forward(requested, other.kv_cache)
        assert logits.dtype == torch.float32
        assert logits.shape == (len(rows), 97)
        assert_close(logits, all_rows[rows])


def test_a_token_does_not_attend_to_later_ones(decoder: Decoder) -> None:
    runner = PagedRunner(decoder, num_blocks=16)
    changed = [*TOKENS[:30], *reversed(TOKENS[30:])]
    rows = runner.step([(runner.add_sequence(), changed)], last_only=False)
    whole = logits_in_chunks(decoder, [60])
    assert_close(rows[:30], whole[:30])
    assert not torch.allclose(rows[31:], whole[31:])


def test_a_window_hides_earlier_positions(tmp_path: Path) -> None:
    decoder = load_decoder(save_model(tmp_path, WINDOW | {"num_hidden_layers": 1}))
    changed = [(token + 1) % 97 for token in TOKENS[:20]] + TOKENS[20:]
    runner = PagedRunner(decoder, num_blocks=16)
    rows = runner.step([(runner.add_sequence(), changed)], last_only=False)
    whole = logits_in_chunks(decoder, [60])
    # A single layer attends to 11 positions, its own included.
    assert_close(rows[30:], whole[30:])
    assert not torch.allclose(rows[29], whole[29])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.04)])
def test_half_precision_stays_close_to_float32(tmp_path: Path, dtype: str, tolerance: float) -> None:
    path = save_model(tmp_path)
    exact = logits_in_chunks(load_decoder(path), [33, 27]).log_softmax(-1)
    decoder = load_decoder(path, dtype=dtype)
    assert str(decoder.dtype) == f"torch.{dtype}"
    rounded = logits_in_chunks(decoder, [33, 27])
    assert rounded.dtype == torch.float32
    assert float((rounded.log_softmax(-1) - exact).abs().max()) < tolerance


def test_plain_torch_calls_back_after_each_layer_when_its_kv_is_written(tmp_path: Path) -> None:
    path = save_model(tmp_path, {"num_hidden_layers": 3})
    decoder = load_decoder(path, kernels=KernelOptions(backend=Backend.REFERENCE))
    runner = PagedRunner(decoder, num_blocks=4, block_size=4)
    runner.kv_cache.zero_()
    batch = runner.make_batch([(runner.add_sequence(), TOKENS[:9])])
    seen: list[Tensor] = []

    def on_layer(num_layers: int) -> None:
        assert num_layers == len(seen) + 1
        assert not runner.kv_cache[:, num_layers:].any()
        seen.append(runner.kv_cache[:, :num_layers].clone())

    logits = decoder.forward(batch, runner.kv_cache, on_layer)
    assert [len(layers[0]) for layers in seen] == [1, 2, 3]
    for num_layers, layers in enumerate(seen, 1):
        # Later layers do not write to these any more.
        assert torch.equal(layers, runner.kv_cache[:, :num_layers])
        assert layers[:, num_layers - 1].any()
    assert torch.equal(logits, decoder.forward(batch, runner.kv_cache))


def test_kernels_that_compute_all_layers_in_one_call_do_not_call_back(tmp_path: Path) -> None:
    decoder = load_decoder(save_model(tmp_path))
    if decoder.kernels.backend != "cpu":
        pytest.skip("the C++ kernels are not built")
    runner = PagedRunner(decoder, num_blocks=4, block_size=4)
    batch = runner.make_batch([(runner.add_sequence(), TOKENS[:9])])
    layers: list[int] = []
    assert torch.equal(decoder.forward(batch, runner.kv_cache, layers.append), decoder.forward(batch, runner.kv_cache))
    assert layers == []


def test_working_memory_is_there_before_the_first_long_prompt(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    decoder = load_decoder(save_model(tmp_path, shape))
    if decoder.kernels.backend != "cpu":
        pytest.skip("the C++ kernels are not built")
    runner = PagedRunner(decoder, num_blocks=64, block_size=16)
    runner.kv_cache.zero_()
    runner.step([(runner.add_sequence(), TOKENS[:8])])
    batch = runner.make_batch([(runner.add_sequence(), [7] * 500)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    decoder.forward(batch, runner.kv_cache)
    # On new memory it takes some 900.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 300


def backends() -> list[Backend]:
    return [Backend.REFERENCE, *([Backend.CPU] if instruction_sets() else [])]


@pytest.mark.parametrize("backend", backends())
def test_an_interrupted_pass_has_no_logits_and_does_not_change_the_next(tmp_path: Path, backend: Backend) -> None:
    decoder = load_decoder(save_model(tmp_path), kernels=KernelOptions(backend=backend))
    undisturbed = logits_in_chunks(decoder, [60])
    assert decoder.interrupt is not None
    decoder.interrupt.set()
    with pytest.raises(PassInterrupted):
        logits_in_chunks(decoder, [60])
    decoder.interrupt.clear()
    assert torch.equal(logits_in_chunks(decoder, [60]), undisturbed)


@pytest.mark.parametrize("backend", backends())
def test_a_pass_can_be_interrupted_at_any_time(tmp_path: Path, backend: Backend) -> None:
    decoder = load_decoder(save_model(tmp_path), kernels=KernelOptions(backend=backend))
    undisturbed = logits_in_chunks(decoder, [60])
    interrupt = decoder.interrupt
    assert interrupt is not None
    with ThreadPoolExecutor(1) as other:
        for _ in range(20):
            interrupt.clear()
            setting = other.submit(interrupt.set)
            with suppress(PassInterrupted):
                assert torch.equal(logits_in_chunks(decoder, [60]), undisturbed)
            setting.result()
