"""A follower copies a block only once the step that writes it has come far enough, and no later."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
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
from tests.support.deadline import DEADLINE_S
from tests.support.devices import DEVICE, gpu_only, keep_busy

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAYOUT = KvLayout.uniform(model="m", dtype="float32", block_size=2, num_layers=2, num_kv_heads=1, head_dim=4)
#: Time in which nothing may happen.
SOON_S = 0.2


class Event:
    """Stands in for `torch.cuda.Event`."""

    waited_for: tuple[Event, ...] = ()

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        Event.waited_for += (self,)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events that were made, in order."""
    made: list[Event] = []

    def event() -> Event:
        made.append(Event())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Event, "waited_for", ())
    return made


def test_waiting_for_a_position_waits_for_the_event_of_its_launch(events: list[Event]) -> None:
    progress = LaunchProgress(GPU)
    for position in (StepPosition(1, 1), StepPosition(1, 2), StepPosition(1), StepPosition(2)):
        progress.record_launch(position)
    for position in (StepPosition(1, 2), StepPosition(1), StepPosition(1, 1), StepPosition(2, 1), StepPosition(0)):
        progress.wait_for(position)
    assert Event.waited_for == tuple(events[index] for index in (1, 2, 0, 3, 0))


def test_a_position_whose_event_is_gone_waits_for_the_oldest_event_kept(events: list[Event]) -> None:
    progress = LaunchProgress(GPU)
    for step in range(1, _KEPT_EVENTS + 3):
        progress.record_launch(StepPosition(step))
    progress.wait_for(StepPosition(1))
    assert Event.waited_for == (events[2],)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_waiting_for_a_position_that_is_not_launched_waits_for_its_launch(
    device: torch.device, events: list[Event]
) -> None:
    progress = LaunchProgress(device)
    progress.record_launch(StepPosition(1))
    reached = threading.Event()

    def wait() -> None:
        progress.wait_for(StepPosition(2, 1))
        reached.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not reached.wait(SOON_S)
    progress.record_launch(StepPosition(2, 1))
    assert reached.wait(DEADLINE_S)
    thread.join()
    assert Event.waited_for == tuple(events[1:])


class HeldDecoder:
    """Writes a layer when it may."""

    def __init__(self) -> None:
        self.may_write = [threading.Event() for _ in range(LAYOUT.num_layers)]
        self.may_end = threading.Event()

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        for layer, allowed in enumerate(self.may_write):
            assert allowed.wait(DEADLINE_S)
            kv_cache[:, layer] = 1 + layer
            if on_layer is not None:
                on_layer(layer + 1)
        assert self.may_end.wait(DEADLINE_S)
        return torch.empty(0)


class Cache:
    """Blocks of one rank; remembers whether they were written."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3, 2, 2, 1, 2, 4)
        self.written = False

    def read_blocks(self, block_ids: Sequence[BlockId], into: Sequence[Tensor], layers: slice) -> None:
        for block_id, data in zip(block_ids, into, strict=True):
            data.copy_(self.tensor[block_id, layers])

    def write_blocks(self, block_ids: Sequence[BlockId], data: Sequence[Tensor], layers: slice) -> None:
        self.written = True


class StartedFollower:
    """A follower on two threads, as rank 0 sees it."""

    def __init__(self, stack: ExitStack) -> None:
        self.decoder, self.cache = HeldDecoder(), Cache()
        self.stage = torch.zeros(3 * LAYOUT.block_bytes, dtype=torch.uint8)
        self.recorded: SimpleQueue[bool] = SimpleQueue()
        members = SimpleNamespace(step_decoder=self.decoder, kv_cache=self.cache, record_next=self.recorded.put)
        shard = cast(ModelShard, members)
        rank = Follower(shard, Stage(self.stage, LAYOUT, torch.float32), CPU)
        steps, their_steps = socket.socketpair()
        self.copies, their_copies = socket.socketpair()
        for end in (their_steps, their_copies):
            stack.enter_context(end)
        for target, stream in ((rank.compute, MessageReader(their_steps)), (rank.copy, their_copies)):
            thread = threading.Thread(target=target, args=(stream,))
            thread.start()
            stack.callback(thread.join)
        for end in (steps, self.copies):
            stack.enter_context(end)
        self.copies.settimeout(DEADLINE_S)
        self._steps, self._replies = StepWriter([steps]), MessageReader(self.copies)

    def start(self, number: int, *, reports_layers: bool = False) -> None:
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
        self._steps.forward(number, batch, reports_layers=reports_layers)

    def record(self, number: int, *, is_idle: bool) -> None:
        self._steps.record(number, is_idle=is_idle)

    def request(self, kind: MessageKind, after: StepPosition, layers: slice = slice(0, 2)) -> None:
        copy = CopyRequest(bundles=[[BlockId(1)]], slots=[2], layers=layers, after=after)
        self.copies.sendall(copy.encode(kind))

    def reply(self) -> tuple[MessageKind, int]:
        message = self._replies.receive()
        assert message is not None
        return message.kind, message.number

    def does_not_reply(self) -> bool:
        self.copies.settimeout(SOON_S)
        try:
            return not self.copies.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.copies.settimeout(DEADLINE_S)

    def read_back(self) -> list[float]:
        """The first number of each layer in the slot."""
        numbers: list[float] = self.stage.view(torch.float32).view(3, 2, -1)[2, :, 0].tolist()
        return numbers


@pytest.fixture
def follower() -> Iterator[StartedFollower]:
    with ExitStack() as stack:
        follower = StartedFollower(stack)
        yield follower
        # A failed test leaves the decoder held.
        for held in (*follower.decoder.may_write, follower.decoder.may_end):
            held.set()


def test_a_block_is_read_after_its_step_has_ended(follower: StartedFollower) -> None:
    follower.start(1)
    follower.request(MessageKind.READ_BLOCKS, StepPosition(1))
    for held in follower.decoder.may_write:
        held.set()
    assert follower.does_not_reply()
    follower.decoder.may_end.set()
    assert follower.reply() == (MessageKind.DONE, 1)
    assert follower.read_back() == [1, 2]


def test_a_graph_is_recorded_between_steps(follower: StartedFollower) -> None:
    for held in (*follower.decoder.may_write, follower.decoder.may_end):
        held.set()
    for number, is_idle in ((1, False), (3, True)):
        follower.record(number, is_idle=is_idle)
        assert follower.recorded.get(timeout=DEADLINE_S) is is_idle
        follower.start(number + 1)
    follower.request(MessageKind.READ_BLOCKS, StepPosition(4))
    assert follower.reply() == (MessageKind.DONE, 4)


def test_a_layer_is_read_as_soon_as_it_is_written(follower: StartedFollower) -> None:
    follower.start(1, reports_layers=True)
    follower.request(MessageKind.READ_BLOCKS, StepPosition(1, 1), slice(0, 1))
    assert follower.does_not_reply()
    follower.decoder.may_write[0].set()
    assert follower.reply() == (MessageKind.DONE, 1)
    assert follower.read_back() == [1, 0]
    follower.request(MessageKind.READ_BLOCKS, StepPosition(1, 2), slice(1, 2))
    assert follower.does_not_reply()
    follower.decoder.may_write[1].set()
    assert follower.reply() == (MessageKind.DONE, 1)


def test_without_layer_reports_a_layer_is_read_after_its_step_has_ended(follower: StartedFollower) -> None:
    follower.start(1)
    follower.decoder.may_write[0].set()
    follower.request(MessageKind.READ_BLOCKS, StepPosition(1, 1), slice(0, 1))
    assert follower.does_not_reply()
    follower.decoder.may_write[1].set()
    follower.decoder.may_end.set()
    assert follower.reply() == (MessageKind.DONE, 1)


def test_blocks_are_not_overwritten_during_a_step(follower: StartedFollower) -> None:
    follower.start(1)
    follower.request(MessageKind.WRITE_BLOCKS, StepPosition(1))
    assert follower.does_not_reply()
    assert not follower.cache.written
    for held in (*follower.decoder.may_write, follower.decoder.may_end):
        held.set()
    assert follower.reply() == (MessageKind.DONE, 1)
    assert follower.cache.written


class TestOnHardware:
    """On a GPU, launched is not yet written."""

    pytestmark = gpu_only

    def test_waiting_for_layers_ends_when_they_are_written_and_no_later(self) -> None:
        progress = LaunchProgress(DEVICE)
        keep_busy()
        written = torch.cuda.Event()
        written.record()
        progress.record_launch(StepPosition(3, 1))
        keep_busy()
        ended = torch.cuda.Event()
        ended.record()
        progress.record_launch(StepPosition(3))
        progress.wait_for(StepPosition(3, 1))
        assert written.query()
        assert not ended.query()
        progress.wait_for(StepPosition(3))
        assert ended.query()
