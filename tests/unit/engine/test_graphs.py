"""Which steps are replayed, with which padding, and which graphs are recorded when. The recorder is a fake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.graph_shapes import GraphShapes, decode_shape, plan_graphs
from pdserve.engine.graphs import Compute, CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.model.batch import Batch
from tests.unit.engine.test_device_batch import DEVICE, decoding, mixed

CACHE = torch.zeros(4)
BLOCK_SIZE = 16
SHAPES = plan_graphs(16, 100, any_width=False)


class Double:
    """Logits that show the row's token, its position and the last block of its context."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.shapes.append((len(batch.token_ids), batch.block_tables.shape[1]))
        if on_layer is not None:
            on_layer(1)
        rows = batch.logits_rows
        last = (batch.context_lens - 1).clamp(min=0) // BLOCK_SIZE
        blocks = batch.block_tables.gather(1, last.view(-1, 1)).view(-1)
        sequences = torch.bucketize(rows, batch.query_starts, right=True) - 1
        return torch.stack((2 * batch.token_ids[rows], batch.positions[rows], blocks[sequences]), dim=1).float()


class Recorder:
    """As `CudaRecorder`: repeats a computation on the same memory, and returns the same tensor."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Compute) -> Compute:
        self.num_recorded += 1
        result = compute()
        return lambda: result.copy_(compute())


def device_decoder(decoder: Double, recorder: Recorder | None = None, shapes: GraphShapes = SHAPES) -> DeviceDecoder:
    return DeviceDecoder(decoder, DEVICE, GraphConfig(recorder=recorder or Recorder(), shapes=shapes, vocab_size=3))


def record_all(decoder: DeviceDecoder, *, is_idle: bool = True) -> int:
    count = 0
    while decoder.record_next(CACHE, is_idle=is_idle):
        count += 1
    return count


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: out of memory", torch.OutOfMemoryError),
        ("CUDA error: an illegal memory access was encountered", torch.AcceleratorError),
    ],
)
def test_memory_that_the_driver_lacks_is_reported_like_memory_that_torch_lacks(
    monkeypatch: pytest.MonkeyPatch, message: str, expected: type[Exception]
) -> None:
    def fails(recorder: CudaRecorder, compute: Compute) -> Compute:
        raise torch.AcceleratorError(message)

    monkeypatch.setattr(CudaRecorder, "_record", fails)
    with pytest.raises(expected, match=message) as raised:
        CudaRecorder().record(lambda: CACHE)
    assert raised.type is expected


def test_a_launched_step_calls_back_after_each_layer_and_a_replayed_one_does_not() -> None:
    replaying = device_decoder(Double())
    record_all(replaying)
    layers: list[int] = []
    replaying.forward(mixed(), CACHE, layers.append)
    assert layers == [1]
    replaying.forward(decoding(3), CACHE, layers.append)
    assert layers == [1]


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_replayed_step_gives_the_decoders_logits_without_padding(is_idle: bool) -> None:
    replaying, plain = device_decoder(decoder := Double()), Double()
    record_all(replaying, is_idle=is_idle)
    for count, num_blocks in ((3, 3), (4, 60), (1, 3), (2, 20), (9, 4), (3, 100), (16, 3), (11, 17)):
        batch = decoding(count, num_blocks)
        assert replaying.forward(batch, CACHE).cpu().equal(plain.forward(batch, CACHE))
        assert decoder.shapes[-1][0] == decode_shape(count, num_blocks).num_sequences


def test_prompts_and_batches_beyond_the_limit_are_launched_without_padding() -> None:
    replaying = device_decoder(decoder := Double())
    record_all(replaying)
    decoder.shapes.clear()
    assert replaying.forward(mixed(), CACHE).tolist() == [[18, 20, 6], [6, 6, 3]]
    assert len(replaying.forward(decoding(17), CACHE)) == 17
    assert decoder.shapes == [(4, 2), (17, 3)]


def test_without_graphs_nothing_is_padded() -> None:
    plain = DeviceDecoder(decoder := Double(), DEVICE)
    assert record_all(plain) == 0
    plain.forward(decoding(3), CACHE)
    assert decoder.shapes == [(3, 3)]


def test_no_step_is_recorded_while_a_request_waits_for_it() -> None:
    recorder = Recorder()
    replaying = device_decoder(decoder := Double(), recorder)

    def shape_of(batch: Batch) -> tuple[int, int]:
        num_recorded = recorder.num_recorded
        replaying.forward(batch, CACHE)
        assert recorder.num_recorded == num_recorded
        return decoder.shapes[-1]

    assert shape_of(decoding(3)) == (3, 3)  # Launched: there is no graph yet.
    assert replaying.record_next(CACHE, is_idle=False)
    assert shape_of(decoding(3)) == (16, 128)
    record_all(replaying, is_idle=False)
    assert [shape_of(decoding(count)) for count in (1, 3, 9)] == [(1, 128), (4, 128), (16, 128)]
    record_all(replaying)
    assert [shape_of(decoding(count, 17)) for count in (1, 3, 9)] == [(1, 32), (4, 32), (16, 32)]


def test_of_the_graphs_with_space_for_a_step_the_cheapest_takes_it() -> None:
    # 100 rows take two row tiles of each product: that costs more than empty programs of a wide table.
    at_start = tuple(decode_shape(*each) for each in ((100, 1024), (64, 16), (1, 1024), (4, 64)))
    replaying = device_decoder(decoder := Double(), shapes=GraphShapes(at_start=at_start))
    record_all(replaying)
    taken = []
    for count, num_blocks in ((1, 3), (2, 17), (1, 65), (5, 3), (5, 17)):
        replaying.forward(decoding(count, num_blocks), CACHE)
        taken.append(decoder.shapes[-1])
    assert taken == [(4, 64), (4, 64), (1, 1024), (64, 16), (128, 1024)]


def test_steps_on_another_cache_are_launched() -> None:
    replaying = device_decoder(decoder := Double())
    record_all(replaying)
    replaying.forward(decoding(3), torch.zeros(4))
    assert decoder.shapes[-1] == (3, 3)


def test_dropped_graphs_are_recorded_again() -> None:
    recorder = Recorder()
    replaying = device_decoder(decoder := Double(), recorder)
    record_all(replaying)
    replaying.drop_graphs()
    replaying.forward(decoding(1), CACHE)
    assert decoder.shapes[-1] == (1, 3)
    assert record_all(replaying) == len(SHAPES.at_start + SHAPES.when_idle)


def test_the_largest_shape_is_recorded_first_because_others_share_its_memory() -> None:
    recorded = []
    replaying = device_decoder(decoder := Double())
    while replaying.record_next(CACHE, is_idle=True):
        recorded.append(decoder.shapes[-1])
    assert recorded[:5] == [(16, 128), (8, 128), (4, 128), (2, 128), (1, 128)]
    assert sorted(recorded[5:]) == [(count, width) for count in (1, 2, 4, 8, 16) for width in (16, 32, 64)]


def test_common_numbers_of_sequences_are_recorded_before_others() -> None:
    shapes = plan_graphs(256, 2048, any_width=False)
    at_start = [(each.num_sequences, each.num_blocks) for each in shapes.at_start]
    common = (256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert at_start == [(count, width) for width in (2048, 256, 1024) for count in common]
    is_common = [each.num_sequences in common for each in shapes.when_idle]
    assert is_common == sorted(is_common, reverse=True)
    # 17 numbers of sequences, each with eight widths.
    assert len(set(shapes.at_start + shapes.when_idle)) == len(shapes.at_start + shapes.when_idle) == 17 * 8


def test_one_width_does_where_attention_takes_as_many_programs_for_any() -> None:
    shapes = plan_graphs(64, 8192, any_width=True)
    assert {each.num_blocks for each in shapes.at_start + shapes.when_idle} == {8192}
    assert [each.num_sequences for each in shapes.at_start] == [64, 32, 16, 8, 4, 2, 1]
    assert [each.num_sequences for each in shapes.when_idle] == [24, 40, 48, 56]
    [largest, *_] = plan_graphs(96, 8192, any_width=True).at_start
    assert largest.num_sequences == 96


def test_the_number_of_graphs_is_bounded_and_the_first_ones_are_kept() -> None:
    every = plan_graphs(512, 8192, any_width=False)
    shapes = plan_graphs(512, 8192, any_width=False, max_graphs=40)
    assert shapes.at_start == every.at_start
    assert shapes.at_start + shapes.when_idle == (every.at_start + every.when_idle)[:40]


@pytest.mark.parametrize(
    ("sequences", "blocks", "padded"),
    [
        (1, 1, (1, 16)),
        (3, 16, (4, 16)),
        (5, 17, (8, 32)),
        (9, 33, (16, 64)),
        (33, 1000, (40, 1024)),
        (64, 1, (64, 16)),
        (65, 1, (96, 16)),
    ],
)
def test_batches_are_padded_to_few_shapes(sequences: int, blocks: int, padded: tuple[int, int]) -> None:
    shape = decode_shape(sequences, blocks)
    assert (shape.num_sequences, shape.num_blocks) == padded
    assert shape.num_tokens == shape.num_logits == shape.num_sequences


@pytest.mark.parametrize("has_graphs", [True, False])
def test_token_ids_on_the_device_are_used_by_recordings_and_replays(has_graphs: bool) -> None:
    replaying = device_decoder(Double())
    if has_graphs:
        record_all(replaying)
    for first in (20, 30):
        sampled = torch.tensor([first, -1, first + 2], device=DEVICE)
        logits = replaying.forward(decoding(3), CACHE, token_ids=sampled)
        assert logits[:, :2].tolist() == [[2 * first, 30], [0, 31], [2 * first + 4, 32]]
    assert replaying.forward(decoding(3), CACHE)[:, :2].tolist() == [[14, 30], [16, 31], [18, 32]]


def test_batches_for_hidden_states_are_launched_even_where_logits_are_replayed() -> None:
    replaying = device_decoder(decoder := Double())
    record_all(replaying)
    replaying.forward(replace(decoding(3), hidden_only=True), CACHE)
    assert decoder.shapes[-1] == (3, 3)
