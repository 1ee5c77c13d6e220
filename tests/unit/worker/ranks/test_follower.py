"""A follower copies layers as soon as it has launched them itself, however far rank 0 may be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.model.batch import Batch
from pdserve.worker.part import ModelPart
from pdserve.worker.ranks.follower import Follower, Progress
from pdserve.worker.ranks.messages import HEADER_BYTES, Kind, MessageReader, StepWriter, encode
from tests.support.devices import DEVICE, gpu_only
from tests.unit.worker.ranks.test_messages import batch

WAIT_S = 20


@contextmanager
def waiting(wait: Callable[..., Any], *arguments: int) -> Iterator[Future[Any]]:
    """Waits on another thread, which has begun to."""
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def run() -> Any:
            begun.set()
            return wait(*arguments)

        future = pool.submit(run)
        assert begun.wait(WAIT_S)
        yield future


def test_layers_are_waited_for_until_they_are_launched() -> None:
    progress = Progress(torch.device("cpu"))
    with waiting(progress.layers_launched, 7, 2) as waited:
        progress.begin_by_layers(7)
        progress.note_layer(1)
        with pytest.raises(TimeoutError):
            waited.result(0.05)
        progress.note_layer(2)
        assert waited.result(WAIT_S) is None


def test_layers_of_an_earlier_step_do_not_count() -> None:
    progress = Progress(torch.device("cpu"))
    progress.begin_by_layers(7)
    progress.note_layer(4)
    progress.note_launch(7)
    progress.begin_by_layers(8)
    with waiting(progress.layers_launched, 8, 2) as waited:
        with pytest.raises(TimeoutError):
            waited.result(0.05)
        progress.note_layer(2)
        assert waited.result(WAIT_S) is None


def test_a_step_that_was_launched_has_all_its_layers() -> None:
    progress = Progress(torch.device("cpu"))
    with waiting(progress.layers_launched, 7, 2) as waited:
        progress.note_launch(7)  # As a graph does it.
        assert waited.result(WAIT_S) is None
    progress.begin_by_layers(9)
    assert progress.layers_launched(7, 2) is None


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


def test_a_layer_is_copied_while_its_step_is_computed_and_not_before_it_is_there() -> None:
    layout = KvLayout(model="m", dtype="float32", block_size=4, num_layers=2, num_kv_heads=1, head_dim=8)
    decoder, cache = TwoLayers(), KvCache(layout, 2, torch.device("cpu"))
    slots = torch.zeros(1, *cache.tensor.shape[1:])
    part = cast(ModelPart, SimpleNamespace(step_decoder=decoder, kv_cache=cache))
    follower = Follower(part, slots, torch.device("cpu"))
    with ExitStack() as stack:
        steps, their_steps, copies, their_copies = (
            stack.enter_context(each) for pair in (socket.socketpair(), socket.socketpair()) for each in pair
        )
        threads = [
            threading.Thread(target=follower.compute, args=(MessageReader(their_steps),)),
            threading.Thread(target=follower.copy, args=(their_copies,)),
        ]
        copies.settimeout(WAIT_S)
        for thread in threads:
            thread.start()
        try:
            # Asked for before the step is known here.
            copies.sendall(encode(Kind.READ_BLOCKS, 3, [1, 0, 1, 1, 0]))
            StepWriter([steps]).forward(3, batch(1, 1), by_layers=True)
            assert len(copies.recv(HEADER_BYTES)) == HEADER_BYTES
            assert (slots[0, 0] == 5).all()
            copies.sendall(encode(Kind.READ_BLOCKS, 3, [2, 1, 2, 1, 0]))
            copies.settimeout(0.05)
            with pytest.raises(TimeoutError):
                copies.recv(HEADER_BYTES)
            assert not slots[0, 1].any()
            decoder.goes_on.set()
            copies.settimeout(WAIT_S)
            assert len(copies.recv(HEADER_BYTES)) == HEADER_BYTES
            assert (slots[0, 1] == 6).all()
        finally:
            decoder.goes_on.set()
            for stream in (steps, copies):
                stream.shutdown(socket.SHUT_WR)
            for thread in threads:
                thread.join(WAIT_S)


class TestOnHardware:
    """Launched is not written."""

    pytestmark = gpu_only

    def test_layers_have_events_of_their_own_while_their_step_is_the_latest_by_layers(self) -> None:
        progress = Progress(DEVICE)
        progress.begin_by_layers(7)
        progress.note_layer(1)
        progress.note_layer(2)
        first, second = progress.layers_launched(7, 1), progress.layers_launched(7, 2)
        progress.note_launch(7)
        assert first is not None
        assert second is not None
        assert first is not second
        assert progress.layers_launched(7, 1) is first
        progress.begin_by_layers(8)
        ended = progress.layers_launched(7, 1)
        assert ended is not None
        assert ended is not first
