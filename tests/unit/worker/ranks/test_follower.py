"""A rank copies no block before the step that writes it is that far, as far as it has to be."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.model.batch import Batch
from pdserve.worker.kv_bytes.stage import Stage
from pdserve.worker.load.model_shard import ModelShard
from pdserve.worker.ranks.follower import _KEPT_EVENTS, Follower, LaunchProgress
from pdserve.worker.ranks.messages import CopyRequest, MessageKind, MessageReader, StepPosition, StepWriter
from tests.support.devices import DEVICE, gpu_only, keep_busy

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAYOUT = KvLayout(model="m", dtype="float32", block_size=2, num_layers=2, num_kv_heads=1, head_dim=4)
DEADLINE_S = 20.0
#: For what must not happen.
SOON_S = 0.2


class Event:
    """As `torch.cuda.Event`."""

    waited_for: tuple[Event, ...] = ()

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        Event.waited_for += (self,)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Those that were made, in order."""
    made: list[Event] = []

    def event() -> Event:
        made.append(Event())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "waited_for", ())
    return made


def test_a_mark_is_waited_for_where_it_was_launched(events: list[Event]) -> None:
    progress = LaunchProgress(GPU)
    for mark in (StepPosition(1, 1), StepPosition(1, 2), StepPosition(1), StepPosition(2)):
        progress.note_launch(mark)
    for mark in (StepPosition(1, 2), StepPosition(1), StepPosition(1, 1), StepPosition(2, 1), StepPosition(0)):
        progress.wait_for(mark)
    assert Event.waited_for == tuple(events[place] for place in (1, 2, 0, 3, 0))


def test_a_mark_that_is_forgotten_is_before_the_oldest_that_is_not(events: list[Event]) -> None:
    progress = LaunchProgress(GPU)
    for step in range(1, _KEPT_EVENTS + 3):
        progress.note_launch(StepPosition(step))
    progress.wait_for(StepPosition(1))
    assert Event.waited_for == (events[2],)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_is_not_launched_is_waited_for(device: torch.device, events: list[Event]) -> None:
    progress = LaunchProgress(device)
    progress.note_launch(StepPosition(1))
    reached = threading.Event()

    def wait() -> None:
        progress.wait_for(StepPosition(2, 1))
        reached.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not reached.wait(SOON_S)
    progress.note_launch(StepPosition(2, 1))
    assert reached.wait(DEADLINE_S)
    thread.join()
    assert Event.waited_for == tuple(events[1:])


class HeldDecoder:
    """Writes a layer when it is told to."""

    def __init__(self) -> None:
        self.may_write = [threading.Event() for _ in range(LAYOUT.num_layers)]
        self.may_end = threading.Event()

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        for layer, told in enumerate(self.may_write):
            assert told.wait(DEADLINE_S)
            kv_cache[:, layer] = 1 + layer
            if on_layer is not None:
                on_layer(layer + 1)
        assert self.may_end.wait(DEADLINE_S)
        return torch.empty(0)


class Cache:
    """Blocks of one rank, and what was read of them."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3, 2, 2, 1, 2, 4)
        self.written = False

    def read_blocks(self, block_ids: Sequence[BlockId], into: Sequence[Tensor], layers: slice) -> None:
        for block_id, data in zip(block_ids, into, strict=True):
            data.copy_(self.tensor[block_id, layers])

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[Tensor], layers: slice) -> None:
        self.written = True


class Led:
    """A follower on two threads, seen from rank 0."""

    def __init__(self, stack: ExitStack) -> None:
        self.decoder, self.cache = HeldDecoder(), Cache()
        self.stage = torch.zeros(3 * LAYOUT.block_bytes, dtype=torch.uint8)
        part = cast(ModelShard, SimpleNamespace(step_decoder=self.decoder, kv_cache=self.cache))
        follower = Follower(part, Stage(self.stage, LAYOUT, torch.float32), CPU)
        steps, their_steps = socket.socketpair()
        self.copies, their_copies = socket.socketpair()
        for each in (their_steps, their_copies):
            stack.enter_context(each)
        for target, of in ((follower.compute, MessageReader(their_steps)), (follower.copy, their_copies)):
            thread = threading.Thread(target=target, args=(of,))
            thread.start()
            stack.callback(thread.join)
        for each in (steps, self.copies):
            stack.enter_context(each)
        self.copies.settimeout(DEADLINE_S)
        self._steps, self._answers = StepWriter([steps]), MessageReader(self.copies)

    def begin(self, number: int, *, notes_layers: bool = False) -> None:
        row = torch.zeros(1, dtype=torch.int64)
        batch = Batch(
            token_ids=row,
            positions=row,
            slot_mapping=row,
            query_starts=torch.tensor([0, 1]),
            context_lens=row + 1,
            block_tables=row.view(1, 1),
            logits_rows=row,
        )
        self._steps.forward(number, batch, notes_layers=notes_layers)

    def ask(self, kind: MessageKind, after: StepPosition, layers: slice = slice(0, 2)) -> None:
        copy = CopyRequest(bundles=[[BlockId(1)]], slots=[2], layers=layers, after=after)
        self.copies.sendall(copy.encode(kind))

    def answer(self) -> tuple[MessageKind, int]:
        message = self._answers.receive()
        assert message is not None
        return message.kind, message.number

    def does_not_answer(self) -> bool:
        self.copies.settimeout(SOON_S)
        try:
            return not self.copies.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.copies.settimeout(DEADLINE_S)

    def read_back(self) -> list[float]:
        """The first number of each layer of the slot."""
        numbers: list[float] = self.stage.view(torch.float32).view(3, 2, -1)[2, :, 0].tolist()
        return numbers


@pytest.fixture
def led() -> Iterator[Led]:
    with ExitStack() as stack:
        led = Led(stack)
        yield led
        # A failed test leaves it held.
        for held in (*led.decoder.may_write, led.decoder.may_end):
            held.set()


def test_a_block_is_read_when_the_step_has_ended(led: Led) -> None:
    led.begin(1)
    led.ask(MessageKind.READ_BLOCKS, StepPosition(1))
    for held in led.decoder.may_write:
        held.set()
    assert led.does_not_answer()
    led.decoder.may_end.set()
    assert led.answer() == (MessageKind.DONE, 1)
    assert led.read_back() == [1, 2]


def test_a_layer_is_read_when_it_is_written_and_no_later(led: Led) -> None:
    led.begin(1, notes_layers=True)
    led.ask(MessageKind.READ_BLOCKS, StepPosition(1, 1), slice(0, 1))
    assert led.does_not_answer()
    led.decoder.may_write[0].set()
    assert led.answer() == (MessageKind.DONE, 1)
    assert led.read_back() == [1, 0]
    led.ask(MessageKind.READ_BLOCKS, StepPosition(1, 2), slice(1, 2))
    assert led.does_not_answer()
    led.decoder.may_write[1].set()
    assert led.answer() == (MessageKind.DONE, 1)


def test_a_layer_that_is_not_noted_is_written_when_the_step_has_ended(led: Led) -> None:
    led.begin(1)
    led.decoder.may_write[0].set()
    led.ask(MessageKind.READ_BLOCKS, StepPosition(1, 1), slice(0, 1))
    assert led.does_not_answer()
    led.decoder.may_write[1].set()
    led.decoder.may_end.set()
    assert led.answer() == (MessageKind.DONE, 1)


def test_blocks_are_not_overwritten_under_a_step(led: Led) -> None:
    led.begin(1)
    led.ask(MessageKind.WRITE_BLOCKS, StepPosition(1))
    assert led.does_not_answer()
    assert not led.cache.written
    for held in (*led.decoder.may_write, led.decoder.may_end):
        held.set()
    assert led.answer() == (MessageKind.DONE, 1)
    assert led.cache.written


class TestOnHardware:
    """What is launched is not written yet."""

    pytestmark = gpu_only

    def test_who_waits_for_layers_goes_on_when_they_are_written_and_not_later(self) -> None:
        progress = LaunchProgress(DEVICE)
        keep_busy()
        written = torch.cuda.Event()
        written.record()
        progress.note_launch(StepPosition(3, 1))
        keep_busy()
        ended = torch.cuda.Event()
        ended.record()
        progress.note_launch(StepPosition(3))
        progress.wait_for(StepPosition(3, 1))
        assert written.query()
        assert not ended.query()
        progress.wait_for(StepPosition(3))
        assert ended.query()
