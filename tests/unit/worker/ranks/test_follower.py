"""A follower copies layers as soon as it has written them itself, however far rank 0 may be."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.model.batch import Batch
from pdserve.worker.blocks import Stage
from pdserve.worker.part import ModelPart
from pdserve.worker.ranks.follower import Follower, Progress
from pdserve.worker.ranks.messages import HEADER_BYTES, Copy, Kind, Mark, MessageReader, StepWriter
from tests.support.devices import DEVICE, gpu_only
from tests.unit.worker.ranks.test_messages import batch

WAIT_S = 20
LAYOUT = KvLayout(model="m", dtype="float32", block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)
CPU = torch.device("cpu")


class TwoLayers:
    """Writes one, then waits until it may write the other."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> None:
        assert on_layer is not None
        kv_cache[1, 0] = 5
        on_layer(1)
        assert self.goes_on.wait(WAIT_S)
        kv_cache[1, 1] = 6
        on_layer(2)


def copy_of(layer: int, after: Mark) -> bytes:
    """Of one layer of block 1, to slot 0."""
    copy = Copy(bundles=[[BlockId(1)]], slots=[0], layers=slice(layer, layer + 1), after=after)
    return copy.encode(Kind.READ_BLOCKS)


def test_a_layer_is_copied_while_its_step_is_computed_and_not_before_it_is_written() -> None:
    decoder, cache = TwoLayers(), KvCache(LAYOUT, 2, CPU)
    memory = torch.zeros(LAYOUT.block_bytes, dtype=torch.uint8)
    stage = Stage(memory, LAYOUT, torch.float32)
    slot = stage.part(0, 1, slice(0, 2))[0]
    part = cast(ModelPart, SimpleNamespace(step_decoder=decoder, kv_cache=cache))
    follower = Follower(part, stage, CPU)
    with ExitStack() as stack:
        steps, their_steps, copies, their_copies = (
            stack.enter_context(each) for pair in (socket.socketpair(), socket.socketpair()) for each in pair
        )
        threads = [
            threading.Thread(target=follower.compute, args=(MessageReader(their_steps),)),
            threading.Thread(target=follower.copy, args=(their_copies,)),
        ]
        for thread in threads:
            thread.start()
        try:
            copies.settimeout(WAIT_S)
            # Asked for before the step is known here.
            copies.sendall(copy_of(0, Mark(3, 1)))
            StepWriter([steps]).forward(3, batch(1, 1), notes_layers=True)
            assert len(copies.recv(HEADER_BYTES)) == HEADER_BYTES
            assert (slot[0] == 5).all()
            copies.sendall(copy_of(1, Mark(3, 2)))
            copies.settimeout(0.05)
            with pytest.raises(TimeoutError):
                copies.recv(HEADER_BYTES)
            assert not slot[1].any()
            decoder.goes_on.set()
            copies.settimeout(WAIT_S)
            assert len(copies.recv(HEADER_BYTES)) == HEADER_BYTES
            assert (slot[1] == 6).all()
        finally:
            decoder.goes_on.set()
            for stream in (steps, copies):
                stream.shutdown(socket.SHUT_WR)
            for thread in threads:
                thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("launched", "waited_for"),
    [
        (Mark(3, 2), Mark(3, 2)),
        (Mark(3, 2), Mark(3, 1)),
        (Mark(3), Mark(3, 2)),
        (Mark(4, 1), Mark(3)),
        (Mark(4, 1), Mark(3, 9)),
    ],
)
def test_what_was_launched_is_not_waited_for(launched: Mark, waited_for: Mark) -> None:
    progress = Progress(CPU)
    progress.wait_for(Mark(0))
    progress.note_launch(launched)
    progress.wait_for(waited_for)


@pytest.mark.parametrize("waited_for", [Mark(3, 3), Mark(3), Mark(4, 1)])
def test_what_was_not_launched_is_waited_for(waited_for: Mark) -> None:
    progress, arrived = Progress(CPU), threading.Event()
    progress.note_launch(Mark(3, 2))

    def wait() -> None:
        progress.wait_for(waited_for)
        arrived.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not arrived.wait(0.05)
    progress.note_launch(waited_for)
    assert arrived.wait(WAIT_S)
    thread.join()


class TestOnHardware:
    """What is launched is not written yet."""

    pytestmark = gpu_only

    def test_who_waits_for_layers_goes_on_when_they_are_written_and_not_later(self) -> None:
        progress, slow = Progress(DEVICE), torch.randn(4096, 4096, device=DEVICE)
        for _ in range(20):
            slow = slow @ slow
        written = torch.cuda.Event()
        written.record()
        progress.note_launch(Mark(3, 1))
        for _ in range(200):
            slow = slow @ slow
        ended = torch.cuda.Event()
        ended.record()
        progress.note_launch(Mark(3))
        progress.wait_for(Mark(3, 1))
        assert written.query()
        assert not ended.query()
        progress.wait_for(Mark(3))
        assert ended.query()
