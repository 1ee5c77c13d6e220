"""Which steps are replayed, with which padding, and how many graphs are kept. The recorder is a fake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.graphs import Compute, DeviceDecoder, GraphConfig, decode_shape
from pdserve.model.batch import Batch
from tests.unit.engine.test_device_batch import DEVICE, decoding, mixed

CACHE = torch.zeros(4)


class Double:
    """Logits that show the row's token and context."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.shapes.append((len(batch.token_ids), batch.block_tables.shape[1]))
        if on_layer is not None:
            on_layer(1)
        rows = batch.logits_rows
        return torch.stack((2 * batch.token_ids[rows], batch.positions[rows]), dim=1).float()


class Recorder:
    """As `CudaRecorder`: repeats a computation on the same memory, and returns the same tensor."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Compute) -> Compute:
        self.num_recorded += 1
        result = compute()
        return lambda: result.copy_(compute())


def device_decoder(
    decoder: Double, recorder: Recorder | None, *, max_num_seqs: int = 16, max_graphs: int = 8, max_blocks: int = 100
) -> DeviceDecoder:
    if recorder is None:
        return DeviceDecoder(decoder, DEVICE)
    graphs = GraphConfig(
        recorder=recorder, max_num_seqs=max_num_seqs, max_blocks=max_blocks, vocab_size=2, max_graphs=max_graphs
    )
    return DeviceDecoder(decoder, DEVICE, graphs)


def test_a_launched_step_calls_back_after_each_layer_and_a_replayed_one_does_not() -> None:
    replaying = device_decoder(Double(), Recorder())
    layers: list[int] = []
    replaying.forward(mixed(), CACHE, layers.append)
    assert layers == [1]
    replaying.forward(decoding(3), CACHE, layers.append)
    assert layers == [1]


def test_a_replayed_step_gives_the_decoders_logits_without_padding() -> None:
    recorder, plain = Recorder(), Double()
    replaying = device_decoder(Double(), recorder)
    for count in (3, 4, 1, 2, 9, 3, 16, 11):
        batch = decoding(count)
        assert replaying.forward(batch, CACHE).cpu().equal(plain.forward(batch, CACHE))
    # The largest first; then 3 and 4 sequences share a shape, 1 and 2 have one each, and so do 9, 11 and 16 together.
    assert recorder.num_recorded == 5


def test_prompts_and_batches_beyond_the_limit_are_launched_without_padding() -> None:
    recorder, decoder = Recorder(), Double()
    replaying = device_decoder(decoder, recorder)
    assert replaying.forward(mixed(), CACHE).tolist() == [[18, 20], [6, 6]]
    assert len(replaying.forward(decoding(17), CACHE)) == 17
    assert recorder.num_recorded == 0
    assert decoder.shapes == [(4, 2), (17, 3)]


def test_without_a_recorder_nothing_is_padded() -> None:
    decoder = Double()
    device_decoder(decoder, None).forward(decoding(3), CACHE)
    assert decoder.shapes == [(3, 3)]


def test_the_least_recently_used_graph_is_dropped_first() -> None:
    recorder = Recorder()
    replaying = device_decoder(Double(), recorder, max_graphs=2)
    for count in (1, 2, 1, 4, 1, 2):  # 2 displaces the largest, then 4 displaces 2, then 2 displaces 4.
        replaying.forward(decoding(count), CACHE)
    assert recorder.num_recorded == 5


def test_dropped_graphs_are_recorded_again() -> None:
    recorder = Recorder()
    replaying = device_decoder(Double(), recorder)
    replaying.forward(decoding(1), CACHE)
    replaying.drop_graphs()
    replaying.forward(decoding(1), CACHE)
    assert recorder.num_recorded == 4


def test_the_largest_shape_is_recorded_first_because_others_share_its_memory() -> None:
    decoder = Double()
    replaying = device_decoder(decoder, Recorder())
    for count in (3, 1, 16):
        replaying.forward(decoding(count), CACHE)
    assert decoder.shapes[0] == (16, 128)
    largest = device_decoder(Double(), recorder := Recorder(), max_blocks=3)
    largest.forward(decoding(16), CACHE)
    assert recorder.num_recorded == 1


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


@pytest.mark.parametrize("recorder", [Recorder(), None])
def test_token_ids_on_the_device_are_used_by_recordings_and_replays(recorder: Recorder | None) -> None:
    replaying = device_decoder(Double(), recorder)
    for first in (20, 30):
        sampled = torch.tensor([first, -1, first + 2], device=DEVICE)
        logits = replaying.forward(decoding(3), CACHE, token_ids=sampled)
        assert logits.tolist() == [[2 * first, 30], [0, 31], [2 * first + 4, 32]]
    assert replaying.forward(decoding(3), CACHE).tolist() == [[14, 30], [16, 31], [18, 32]]


def test_batches_for_hidden_states_are_launched_even_where_logits_are_replayed() -> None:
    recorder = Recorder()
    replaying = device_decoder(Double(), recorder)
    replaying.forward(replace(decoding(3), hidden_only=True), CACHE)
    assert recorder.num_recorded == 0
