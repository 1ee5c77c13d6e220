"""`python -m pdserve.worker.ranks.follower STEPS COPIES STAGE`: a rank that computes what rank 0 sends it.

A worker with `--tensor-parallel-size` starts it as a child process; the arguments are descriptors. It ends when the
worker closes them or is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

import torch

from kernels.decoder import LayerListener
from kernels.ranks import TorchRanks
from pdserve.base import logs
from pdserve.base.errors import SetupError
from pdserve.base.ids import BlockId
from pdserve.worker.kv_bytes.stage import Stage, stage_bytes
from pdserve.worker.load.cores import num_cores
from pdserve.worker.load.device import open_device
from pdserve.worker.load.model_shard import ModelShard, load_shard
from pdserve.worker.ranks.messages import MessageKind, MessageReader, RankMessage, StepPosition, encode
from pdserve.worker.ranks.process_group import RanksUnreachable, agree, form_group
from pdserve.worker.ranks.shared_stage import heads_of_rank, map_stage
from pdserve.worker.ranks.split import config_of_rank
from pdserve.worker.ranks.startup import RankSetup, SetupReply, SetupState, receive_line, send_line

log = logs.get_logger(__name__)

#: Number of events that are kept: about one for each layer of the two steps that may be in flight.
_KEPT_EVENTS = 256
#: Time after the end of the worker at which a rank that has not noticed it is ended.
_END_S = 3.0


class LaunchProgress:
    """Position up to which steps have been launched, with events: recorded by one thread, awaited by another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._launched = StepPosition(0)
        #: The latest launches on a GPU.
        self._events: deque[tuple[StepPosition, torch.cuda.Event]] = deque(maxlen=_KEPT_EVENTS)

    def record_launch(self, position: StepPosition) -> None:
        """Steps have been launched up to `position`. On a CPU they have also been computed."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        with self._changed:
            self._launched = position
            if event is not None:
                self._events.append((position, event))
            self._changed.notify_all()

    def wait_for(self, position: StepPosition) -> None:
        """Returns when steps have been computed up to `position`. Rank 0 has almost reached it: the wait is short."""
        with self._changed:
            self._changed.wait_for(lambda: self._launched >= position)
            # An event that is no longer kept precedes the oldest one that is.
            event = next((event for kept, event in self._events if kept >= position), None)
        if event is not None:
            event.synchronize()


class Follower:
    """A rank that has loaded its shard."""

    def __init__(self, shard: ModelShard, stage: Stage, device: torch.device) -> None:
        """`stage`: with the heads of this rank."""
        self._shard = shard
        self._stage = stage
        self._progress = LaunchProgress(device)

    def compute(self, steps: MessageReader) -> None:
        """Computes steps until rank 0 closes the stream."""
        cache = self._shard.kv_cache
        with torch.inference_mode():
            while (message := steps.receive()) is not None:
                if message.kind is MessageKind.FORWARD:
                    on_layer = self._layer_listener(message.number) if message.reports_layers else None
                    self._shard.step_decoder.forward(message.batch(), cache.tensor, on_layer)
                elif message.kind is MessageKind.RECORD:
                    self._shard.record_next(bool(message.values[0]))
                else:
                    assert message.kind is MessageKind.COPY_BLOCKS
                    cache.copy_blocks([(BlockId(a), BlockId(b)) for a, b in message.values.view(-1, 2).tolist()])
                self._progress.record_launch(StepPosition(message.number))

    def _layer_listener(self, step: int) -> LayerListener:
        return lambda num_layers: self._progress.record_launch(StepPosition(step, num_layers))

    def copy(self, stream: socket.socket) -> None:
        """Copies blocks until rank 0 closes the stream."""
        requests = MessageReader(stream)
        while (message := requests.receive()) is not None:
            self._copy(message)
            stream.sendall(encode(MessageKind.DONE, message.number))

    def _copy(self, message: RankMessage) -> None:
        copy = message.copy()
        blocks = self._stage.blocks(copy.bundles, copy.slots, copy.layers)
        block_ids = [block_id for bundle in copy.bundles for block_id in bundle]
        self._progress.wait_for(copy.after)
        if message.kind is MessageKind.READ_BLOCKS:
            self._shard.kv_cache.read_blocks(block_ids, blocks, copy.layers)
        else:
            assert message.kind is MessageKind.WRITE_BLOCKS
            self._shard.kv_cache.write_blocks(block_ids, blocks, copy.layers)


def load(setup: RankSetup, stage: int, copies: socket.socket) -> Follower:
    """Loads in step with the other ranks. Raises `SetupError`, `RanksUnreachable`."""
    config = config_of_rank(setup.config, setup.rank, num_cores=num_cores())
    size = config.tensor_parallel_size
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = open_device(config.device)
    send_line(copies, SetupReply(state=SetupState.STARTED).to_json())
    group, device_bytes = form_group(Path(setup.rendezvous), setup.rank, size, device)
    shard = load_shard(
        config,
        device,
        ranks=TorchRanks(group),
        agree=lambda budget: agree(group, device, budget),
        group_bytes=device_bytes,
    )
    memory = map_stage(stage, stage_bytes(shard.layout, config.staging_memory), device)
    heads = heads_of_rank(shard.layout, setup.rank, size)
    return Follower(shard, Stage(memory, shard.layout, shard.kv_cache.tensor.dtype, heads), device)


def main() -> None:
    """Command line entry."""
    # The worker handles these signals: it drains, and then ends its ranks.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    steps, copies, stage = map(int, sys.argv[1:])
    threading.Thread(target=_end_with_worker, args=(steps,), name="worker", daemon=True).start()
    _leave(_follow(socket.socket(fileno=steps), socket.socket(fileno=copies), stage))


def _follow(step_stream: socket.socket, copy_stream: socket.socket, stage: int) -> int:
    """Runs until rank 0 closes the streams. Returns the exit code."""
    message = receive_line(copy_stream)
    if message is None:
        return 0
    setup = RankSetup.from_json(message)
    logs.configure(setup.name, setup.config.log_level, setup.config.log_format)
    try:
        follower = load(setup, stage, copy_stream)
        send_line(copy_stream, SetupReply(state=SetupState.READY).to_json())
    except ConnectionError:
        return 1  # The worker is gone.
    except (SetupError, RanksUnreachable) as error:
        with contextlib.suppress(OSError):
            is_consequence = isinstance(error, RanksUnreachable)
            reply = SetupReply(state=SetupState.FAILED, error=str(error), is_consequence=is_consequence)
            send_line(copy_stream, reply.to_json())
        return 1
    except Exception as error:  # noqa: BLE001 - the worker notices that this process ends; the log says why
        log.error("rank_failed", error)
        return 1
    threading.Thread(target=_copy, args=(follower, copy_stream), name="copies", daemon=True).start()
    try:
        follower.compute(MessageReader(step_stream))
    except Exception as error:  # noqa: BLE001 - as above
        log.error("rank_failed", error)
        return 1
    return 0


def _copy(follower: Follower, stream: socket.socket) -> None:
    try:
        follower.copy(stream)
    except ConnectionError:
        pass  # The worker is gone.
    except BaseException as error:  # noqa: BLE001 - the worker has to notice: its connection ends
        log.error("copy_failed", error)
        _leave(1)


def _end_with_worker(steps: int) -> None:
    """Ends this process when its worker is gone, even if its main thread waits for other ranks or for a GPU."""
    poll = select.poll()
    poll.register(steps, select.POLLRDHUP)
    poll.poll()
    # Between two steps, the main thread notices by itself.
    time.sleep(_END_S)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """Exits at once. Shutting down the interpreter would wait for threads of gloo and NCCL, or crash in them."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
