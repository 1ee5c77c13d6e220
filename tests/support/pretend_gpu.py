"""Fakes of GPUs and NCCL in host memory. Transfers end late and in order, wait for their peer, and can be aborted.

They share these properties with NCCL: the first transfer of a group makes its communicator and waits for the peer. Only
an abort ends a transfer whose peer does not come, and it ends only its own side. An aborted transfer leaves its writes.
A message moves in halves, one at each poll for its end.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition, Event

import numpy as np
from torch._C._distributed_c10d import Store

from kvtransfer.transport import Buffer
from kvtransfer.transport.torch_distributed.pair_link import CONNECTOR_RANK, LISTENER_RANK

#: Upper bound of a wait in a failing test.
_LIMIT_S = 30.0


@dataclass(eq=False, slots=True)
class PretendInFlight:
    """Implements `LaunchedTransfer`."""

    payload: Buffer
    advance: Callable[[], None]
    half_done: bool = False
    is_over: bool = False

    def ended(self) -> bool:
        self.advance()
        return self.is_over


@dataclass(eq=False, slots=True)
class _Link:
    """The connection of two groups; guarded by `changed`."""

    changed: Condition = field(default_factory=Condition)
    #: By rank: transfers that were launched and have not ended, oldest first.
    in_flight: tuple[deque[PretendInFlight], deque[PretendInFlight]] = field(default_factory=lambda: (deque(), deque()))
    joined: set[int] = field(default_factory=set)


_LINKS: dict[bytes, _Link] = {}


class PretendCommunicator:
    """Implements `Communicator`."""

    def __init__(self, gpu: PretendGpu, store: Store, rank: int) -> None:
        self._gpu = gpu
        self._rank = rank
        self._aborted = False
        # The first of the two names the link for both.
        self._link = _LINKS.setdefault(store.compare_set("link", "", uuid.uuid4().hex), _Link())

    def send(self, payload: Buffer) -> PretendInFlight:
        return self._launch(payload)

    def receive(self, payload: Buffer) -> PretendInFlight:
        return self._launch(payload)

    def abort(self) -> None:
        self._gpu.aborts.put(None)
        assert self._gpu.lets_abort.wait(_LIMIT_S)
        with self._link.changed:
            if self._rank not in self._link.joined:
                return  # The communicator is still being made.
            self._aborted = True
            transfers = self._link.in_flight[self._rank]
            while transfers:
                transfers.popleft().is_over = True

    def _launch(self, payload: Buffer) -> PretendInFlight:
        if self._rank not in self._link.joined:
            self._gpu.makes.put(None)
        if not self._gpu.lets_make.wait(self._gpu.make_limit_s):
            raise RuntimeError("the communicator was not made")
        if self._gpu.nccl_error is not None:
            raise self._gpu.nccl_error
        transfer = PretendInFlight(payload, self._advance)
        with self._link.changed:
            self._link.joined.add(self._rank)
            self._link.changed.notify_all()
            if not self._link.changed.wait_for(lambda: len(self._link.joined) == 2, self._gpu.make_limit_s):
                raise RuntimeError("the communicator was not made")
            if self._aborted:
                raise RuntimeError("the communicator was aborted")
            self._link.in_flight[self._rank].append(transfer)
        self._gpu.launched.put(payload.nbytes)
        return transfer

    def _advance(self) -> None:
        with self._link.changed:
            sent, received = self._link.in_flight[CONNECTOR_RANK], self._link.in_flight[LISTENER_RANK]
            if not sent or not received:
                return
            source, target = sent[0].payload, received[0].payload
            assert source.nbytes == target.nbytes, "both sides transfer the same message"
            middle = source.nbytes // 2
            if not received[0].half_done:
                target[:middle] = source[:middle]
                received[0].half_done = True
            elif self._gpu.lets_through.is_set():
                target[middle:] = source[middle:]
                sent.popleft().is_over = received.popleft().is_over = True


class PretendGpu:
    """Implements `Gpu`. While an event is clear, the operations that it names block."""

    def __init__(self, name: str | None = None) -> None:
        self.uuid = name or f"GPU-{uuid.uuid4()}"
        #: Lets the second halves of messages through, for both sides, because the polling side moves them.
        self.lets_through = Event()
        self.lets_abort = Event()
        self.lets_make = Event()
        self.lets_copy = Event()
        self.lets_allocate = Event()
        self.let_all()
        self.make_limit_s = _LIMIT_S
        #: Bytes of each launched transfer, of each requested allocation, and of each one that was made.
        self.launched: SimpleQueue[int] = SimpleQueue()
        self.requested: SimpleQueue[int] = SimpleQueue()
        self.allocated: list[int] = []
        #: An entry for each abort, made as it starts.
        self.aborts: SimpleQueue[None] = SimpleQueue()
        #: An entry for each call that must make a communicator, and for each poll of a copy.
        self.makes: SimpleQueue[None] = SimpleQueue()
        self.looks: SimpleQueue[None] = SimpleQueue()
        self.has_memory = True
        #: Error that a launch raises.
        self.nccl_error: Exception | None = None

    def let_all(self) -> None:
        """Sets all events, so that no operation blocks."""
        for event in (self.lets_through, self.lets_abort, self.lets_make, self.lets_copy, self.lets_allocate):
            event.set()

    def open_communicator(self, store: Store, rank: int) -> PretendCommunicator:
        return PretendCommunicator(self, store, rank)

    def empty(self, num_bytes: int) -> Buffer:
        self.requested.put(num_bytes)
        assert self.lets_allocate.wait(_LIMIT_S)
        if not self.has_memory:
            raise RuntimeError("out of memory")
        self.allocated.append(num_bytes)
        return np.zeros(num_bytes, np.uint8)

    def copy(self, source: Buffer, target: Buffer) -> PretendInFlight:
        def advance() -> None:
            self.looks.put(None)
            if self.lets_copy.is_set():
                target[:] = source
                transfer.is_over = True

        transfer = PretendInFlight(target, advance)
        return transfer
