"""Which steps are replayed, with which padding, and how many recordings are kept. The GPU's part is a stand-in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.graphs import Compute, DeviceDecoder, GraphConfig, decode_shape
from pdserve.model.batch import Batch
from tests.unit.engine.test_device_batch import DEVICE, decoding, mixed

CACHE = torch.zeros(4)


class Double:
    """Logits that tell the row's token and context."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.shapes.append((len(batch.token_ids), batch.block_tables.shape[1]))
        if on_layer is not None:
            on_layer(1)
        rows = batch.logits_rows
        return torch.stack((2 * batch.token_ids[rows], batch.positions[rows]), dim=1).float()


class Recorder:
    """As `CudaRecorder`: what is recorded runs again on the same memory, and gives the same tensor."""

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


def test_a_step_that_is_launched_tells_its_layers_and_one_that_is_replayed_does_not() -> None:
    replaying = device_decoder(Double(), Recorder())
    told: list[int] = []
    replaying.forward(mixed(), CACHE, told.append)
    assert told == [1]
    replaying.forward(decoding(3), CACHE, told.append)
    assert told == [1]


def test_a_replayed_step_gives_what_the_decoder_gives_for_its_own_rows() -> None:
    recorder, plain = Recorder(), Double()
    replaying = device_decoder(Double(), recorder)
    for count in (3, 4, 1, 2, 9, 3, 16, 11):
        batch = decoding(count)
        assert replaying.forward(batch, CACHE).cpu().equal(plain.forward(batch, CACHE))
    # The largest, which is that of 9, 11 and 16 but for tables; 3 and 4, 1, 2, and those.
    assert recorder.num_recorded == 5


def test_prompts_and_crowds_are_computed_as_they_are() -> None:
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


def test_the_longest_unused_recording_makes_room() -> None:
    recorder = Recorder()
    replaying = device_decoder(Double(), recorder, max_graphs=2)
    for count in (1, 2, 1, 4, 1, 2):  # 2 displaces the largest, 4 then 2, and 2 then 4
        replaying.forward(decoding(count), CACHE)
    assert recorder.num_recorded == 5


def test_dropped_graphs_are_recorded_again() -> None:
    recorder = Recorder()
    replaying = device_decoder(Double(), recorder)
    replaying.forward(decoding(1), CACHE)
    replaying.drop_graphs()
    replaying.forward(decoding(1), CACHE)
    assert recorder.num_recorded == 4


def test_the_largest_shape_is_recorded_first_so_that_the_others_find_room_in_its_memory() -> None:
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
def test_few_shapes_occur(sequences: int, blocks: int, padded: tuple[int, int]) -> None:
    shape = decode_shape(sequences, blocks)
    assert (shape.num_sequences, shape.num_blocks) == padded
    assert shape.num_tokens == shape.num_logits == shape.num_sequences


@pytest.mark.parametrize("recorder", [Recorder(), None])
def test_tokens_of_the_device_are_computed_with_whether_recorded_now_or_replayed(recorder: Recorder | None) -> None:
    replaying = device_decoder(Double(), recorder)
    for first in (20, 30):
        drawn = torch.tensor([first, -1, first + 2], device=DEVICE)
        logits = replaying.forward(decoding(3), CACHE, token_ids=drawn)
        assert logits.tolist() == [[2 * first, 30], [0, 31], [2 * first + 4, 32]]
    assert replaying.forward(decoding(3), CACHE).tolist() == [[14, 30], [16, 31], [18, 32]]
