"""`python -m pdserve.worker.ranks.follower STEPS COPIES STAGE`: a rank that computes what rank 0 tells it to.

Started by a worker with `--tensor-parallel-size`, whose child it is; the arguments are descriptors. It ends when the
worker closes them, or is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from kernels.ranks import TorchRanks
from pdserve.base import logs
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.worker.blocks import slots_of, stage_bytes
from pdserve.worker.cores import num_cores
from pdserve.worker.device import open_device
from pdserve.worker.part import ModelPart, load_part
from pdserve.worker.ranks.group import agree, form_group
from pdserve.worker.ranks.messages import Kind, Message, MessageReader, encode
from pdserve.worker.ranks.order import Order, receive_line, send_line
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.ranks.stage import map_stage, slots_of_rank

log = logs.get_logger(__name__)

#: Steps that may be under way at a time, and one more.
_KEPT_STEPS = 3
#: Where the worker is gone, a rank that waits for others on a GPU does not notice.
_END_S = 5.0


class Progress:
    """Which steps have been launched, and when they have ended: said by one thread, waited for by another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._launched = 0
        #: Number and event of the latest steps on a GPU.
        self._events: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_KEPT_STEPS)
        #: The step that is launched layer by layer, or was last; its layers so far; and on a GPU, their events.
        self._by_layers = self._num_layers = 0
        self._layer_events: dict[int, torch.cuda.Event] = {}

    def begin_by_layers(self, number: int) -> None:
        """`note_layer` follows for each of its layers."""
        with self._changed:
            self._by_layers, self._num_layers = number, 0
            self._layer_events.clear()

    def note_layer(self, num_layers: int) -> None:
        """K and V of so many layers were launched; on a CPU they are written."""
        event = self._event()
        with self._changed:
            self._num_layers = num_layers
            if event is not None:
                self._layer_events[num_layers] = event
            self._changed.notify_all()

    def layers_launched(self, number: int, num_layers: int) -> torch.cuda.Event | None:
        """Returns when so many layers of that step were launched; the event is when they are written, None: now."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._launched >= number or (self._by_layers == number and self._num_layers >= num_layers)
            )
            if self._by_layers == number and num_layers in self._layer_events:
                return self._layer_events[num_layers]
            return next((event for kept, event in self._events if kept >= number), None)

    def note_launch(self, number: int) -> None:
        """On a CPU it has also ended."""
        event = self._event()
        with self._changed:
            self._launched = number
            if event is not None:
                self._events.append((number, event))
            self._changed.notify_all()

    def wait_until_ended(self, number: int) -> None:
        """Returns when that step, and all before it, have ended. Rank 0 has seen the result of it: that is soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._launched >= number)
            # One that is not kept any more ended before the oldest that is.
            event = next((event for kept, event in self._events if kept >= number), None)
        if event is not None and number:
            event.synchronize()

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class Follower:
    """The rank, once it is loaded."""

    def __init__(self, part: ModelPart, slots: Tensor, device: torch.device) -> None:
        """`slots`: its heads of all slots of the stage."""
        self._part = part
        self._slots = slots
        self._progress = Progress(device)

    def compute(self, steps: MessageReader) -> None:
        """Until rank 0 closes the stream."""
        cache = self._part.kv_cache
        with torch.inference_mode():
            while (message := steps.receive()) is not None:
                if message.kind is Kind.FORWARD:
                    self._part.step_decoder.forward(message.batch(), cache.tensor)
                elif message.kind is Kind.FORWARD_BY_LAYERS:
                    self._progress.begin_by_layers(message.number)
                    self._part.step_decoder.forward(message.batch(), cache.tensor, self._progress.note_layer)
                else:
                    assert message.kind is Kind.COPY_BLOCKS
                    cache.copy_blocks((BlockId(a), BlockId(b)) for a, b in message.values.view(-1, 2).tolist())
                self._progress.note_launch(message.number)

    def copy(self, stream: socket.socket) -> None:
        """Until rank 0 closes the stream."""
        requests = MessageReader(stream)
        while (message := requests.receive()) is not None:
            self._copy(message)
            stream.sendall(encode(Kind.DONE, message.number))

    def _copy(self, message: Message) -> None:
        num_layers, first, stop = message.values[:3].tolist()
        layers = slice(first, stop)
        blocks, slots = message.values[3:].view(2, -1).tolist()
        block_ids = [BlockId(block) for block in blocks]
        parts = [self._slots[slot, layers] for slot in slots]
        after = None
        if num_layers:
            after = self._progress.layers_launched(message.number, num_layers)
        else:
            self._progress.wait_until_ended(message.number)
        if message.kind is Kind.READ_BLOCKS:
            self._part.kv_cache.read_blocks(block_ids, parts, layers, after)
        else:
            assert message.kind is Kind.WRITE_BLOCKS
            self._part.kv_cache.write_blocks(block_ids, parts, layers)


def load(order: Order, stage: int, copies: socket.socket) -> Follower:
    """Loads in step with the other ranks. Raises `SetupError`."""
    config = config_of_rank(order.config, order.rank, num_cores=num_cores())
    size = config.tensor_parallel_size
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = open_device(config.device)
    send_line(copies, {"state": "here"})
    group = form_group(Path(order.rendezvous), order.rank, size, device)
    part = load_part(config, device, ranks=TorchRanks(group), agree=lambda budget: agree(group, device, budget))
    memory = map_stage(stage, stage_bytes(part.layout, config.staging_memory), device)
    slots = slots_of(memory, part.layout, part.kv_cache.tensor.dtype)
    return Follower(part, slots_of_rank(slots, order.rank, size), device)


def main() -> None:
    """Command line entry."""
    # The worker is told to stop, and drains; then it lets go of its ranks.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    steps, copies, stage = map(int, sys.argv[1:])
    with socket.socket(fileno=steps) as step_stream, socket.socket(fileno=copies) as copy_stream:
        message = receive_line(copy_stream)
        if message is None:
            return
        order = Order.from_json(message)
        logs.configure(order.name, order.config.log_level)
        try:
            follower = load(order, stage, copy_stream)
            send_line(copy_stream, {"state": "ready"})
        except SetupError as error:
            send_line(copy_stream, {"error": str(error)})
            sys.exit(1)
        ended = threading.Event()
        copying = threading.Thread(target=_copy, args=(follower, copy_stream, ended), name="copies", daemon=True)
        copying.start()
        try:
            follower.compute(MessageReader(step_stream))
        finally:
            ended.set()
        # What it holds must be gone before the interpreter is: gloo's threads do not survive that.
        copying.join(_END_S)


def _copy(follower: Follower, stream: socket.socket, ended: threading.Event) -> None:
    """Sees to it that this process ends with its worker, too, wherever its main thread may be waiting."""
    try:
        follower.copy(stream)
    except OSError:
        pass  # The worker is gone.
    except BaseException as error:  # noqa: BLE001 - the worker has to hear of it: its connection ends
        log.error("copy_failed", error)
        os._exit(1)
    if not ended.wait(_END_S):
        os._exit(1)


if __name__ == "__main__":
    main()
