"""The messages of one pair over NCCL, in the memory of GPUs: when transfers are launched, end, and are given up.

Transfers are kernels that wait for those of the other process. They are launched on one thread and waited for on
another, so that the next one is there when one ends. Nothing but aborting the whole communicator ends a kernel whose
peer does not come, and its buffer is in use until it has ended. Decision 26 says what torch and NCCL do then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Event, Lock, Semaphore, Thread
from typing import Protocol

from torch._C._distributed_c10d import Store

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.torch_distributed.pair_link import (
    CONNECTOR_RANK,
    LISTENER_RANK,
    RENDEZVOUS_TIMEOUT,
    TRANSFER_TIMEOUT,
    Rendezvous,
)
from kvtransfer.transport.torch_distributed.serial_thread import SerialThread
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Hides launches, and the time between two looks, behind transfers. So few fit into NCCL's queue: it does not block.
_MAX_LAUNCHED = 4
#: CUDA has no wait that ends at a time or when somebody says so. A message of 32 MiB takes about as long.
_POLL_S = 1e-4
#: The store has no wait that ends when somebody says so.
_MEET_POLL_S = 0.01
#: A call into NCCL takes less, unless it waits for the peer.
_CALL_S = 1.0
#: The first one, which makes the communicator. An abort does not reach that, and must not meet torch noting it down.
_MAKING_S = RENDEZVOUS_TIMEOUT.total_seconds()
#: For threads to end when everything was aborted.
_CLOSE_S = 5.0
#: Their memory is not planned for. Handovers post first: what comes early is a stray.
_MAX_EARLY = 8
#: Two of the largest bundles of blocks (`kvtransfer/handover/staging.py`).
_MAX_UNMATCHED_BYTES = 64 << 20


class InFlight(Protocol):
    """A kernel or copy that was launched. Keeps its memory alive."""

    def ended(self) -> bool:
        """Nothing of it touches its buffer any more, and what it wrote is there. Raises `RuntimeError`."""


class Communicator(Protocol):
    """A communicator of two ranks, made by the first transfer. Calls raise whatever torch has for an error."""

    def send(self, payload: Buffer) -> InFlight:
        """Launches; blocks only while the communicator is being made."""

    def receive(self, payload: Buffer) -> InFlight:
        """The same."""

    def abort(self) -> None:
        """Ends all transfers, however far they are, and takes the communicator down; blocks meanwhile.

        From any thread, any number of times. A communicator that is still being made goes on being made.
        """


class Gpu(Protocol):
    """What links need of the GPU in whose memory buffers are."""

    @property
    def uuid(self) -> str:
        """Names it, without blanks."""

    def open_communicator(self, store: Store, rank: int) -> Communicator:
        """With the other process that looks into this store. Does not wait for it. Raises `RuntimeError`."""

    def empty(self, num_bytes: int) -> Buffer:
        """Memory of the GPU. Raises `RuntimeError` when there is none."""

    def copy(self, source: Buffer, target: Buffer) -> InFlight:
        """Launches. Raises `RuntimeError`."""


class _Sink:
    """Where messages land that nobody wants: those of all pairs, each over the others."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._memory: Buffer | None = None
        self._growing = Lock()

    def of(self, num_bytes: int) -> Buffer:
        """Raises as `Gpu.empty`."""
        with self._growing:
            if self._memory is None or self._memory.nbytes < num_bytes:
                self._memory = self._gpu.empty(num_bytes)
            return self._memory[:num_bytes]


class NcclLink:
    """Implements `PairLink`."""

    def __init__(self, gpu: Gpu, sink: _Sink, name: str, transfer_timeout_s: float) -> None:
        self._gpu = gpu
        self._sink = sink
        self._transfer_timeout_s = transfer_timeout_s
        self._launching, self._ending = SerialThread(f"{name}-launch"), SerialThread(f"{name}-end")
        self._slots = Semaphore(_MAX_LAUNCHED)
        #: Sends or receives, as the rank does.
        self._start: Callable[[Buffer], InFlight] | None = None
        self._group: Communicator | None = None
        #: Held during calls into NCCL, which frees a communicator that it aborts.
        self._calling = Lock()
        #: How long the abort waits for the end of a call.
        self._call_s = _MAKING_S
        self._state = Lock()
        self._broken = False
        self._aborting: Thread | None = None
        self._aborted = Event()

    def form(self, rendezvous: Rendezvous) -> Future[None]:
        """With a first message, so that the communicator is there and its memory taken when the first block comes."""
        formed: Future[None] = Future()
        self._launching.submit(partial(self._form, rendezvous, formed))
        return formed

    def send(self, payload: Buffer) -> Future[Buffer]:
        return self._submit(lambda: payload)

    receive = send

    def receive_unmatched(self, num_bytes: int, *, keeps: bool) -> Future[Buffer]:
        return self._submit(partial(self._gpu.empty if keeps else self._sink.of, num_bytes))

    def break_off(self) -> Future[None]:
        self._break()
        over: Future[None] = Future()
        self._launching.submit(partial(self._ending.submit, partial(self._finish, over)))
        self._launching.close()
        return over

    def join(self) -> None:
        for thread in (self._launching, self._ending, self._aborting):
            assert thread is not None, "it was broken off"
            thread.join()

    def _submit(self, memory: Callable[[], Buffer]) -> Future[Buffer]:
        done: Future[Buffer] = Future()
        self._launching.submit(partial(self._launch, memory, done, self._transfer_timeout_s))
        return done

    # The launching thread.
    def _form(self, rendezvous: Rendezvous, formed: Future[None]) -> None:
        try:
            store = rendezvous.open_store()
            self._group = group = self._gpu.open_communicator(store, rendezvous.rank)
            first = self._gpu.empty(1)
            self._meet(store, rendezvous.rank)
        except Exception as error:  # noqa: BLE001 - torch has ValueError and TypeError, too; nobody else hears of it
            formed.set_exception(error)
            return
        self._start = group.send if rendezvous.rank == CONNECTOR_RANK else group.receive
        hello: Future[Buffer] = Future()
        hello.add_done_callback(partial(_pass_on, formed))
        self._launch(lambda: first, hello, RENDEZVOUS_TIMEOUT.total_seconds())
        self._call_s = _CALL_S

    def _meet(self, store: Store, rank: int) -> None:
        """When both have what they need: nothing reaches whoever waits in NCCL for a process that does not come."""
        until = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
        here, there = f"here/{rank}", f"here/{LISTENER_RANK if rank == CONNECTOR_RANK else CONNECTOR_RANK}"
        store.set(here, "")
        while not store.check([there]):
            if self._broken or time.monotonic() > until:
                raise RuntimeError("the other process did not come")
            time.sleep(_MEET_POLL_S)

    def _launch(self, memory: Callable[[], Buffer], done: Future[Buffer], timeout_s: float) -> None:
        self._slots.acquire()
        payload = None
        try:
            with self._calling:
                if self._broken or self._start is None:
                    raise RuntimeError("the pair was broken off")
                payload = memory()
                flight = self._start(payload)
        except Exception as error:  # noqa: BLE001 - as in `_form`
            self._break()
            if payload is None:  # NCCL has not seen it: it does not wait for what NCCL does.
                self._slots.release()
                done.set_exception(error)
            else:
                self._ending.submit(partial(self._fail, error, done))
        else:
            self._ending.submit(partial(self._end, flight, payload, done, timeout_s))

    # The ending thread.
    def _end(self, flight: InFlight, payload: Buffer, done: Future[Buffer], timeout_s: float) -> None:
        try:
            self._wait_for(flight, timeout_s)
        except Exception as error:  # noqa: BLE001 - as in `_form`
            self._break()
            self._fail(error, done)
            return
        self._slots.release()
        # What NCCL aborts ends like what has arrived.
        if self._broken:
            done.set_exception(RuntimeError("the pair was broken off"))
        else:
            done.set_result(payload)

    def _wait_for(self, flight: InFlight, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not flight.ended():
            if time.monotonic() > until and not self._broken:
                log.warning("nccl_pair_broken", reason="a message did not get through", after_s=timeout_s)
                self._break()
            time.sleep(_POLL_S)

    def _fail(self, error: Exception, done: Future[Buffer]) -> None:
        """For want of knowing how far NCCL came with the buffer: when everything of the pair is over."""
        self._aborted.wait()
        done.set_exception(error)

    def _finish(self, over: Future[None]) -> None:
        self._aborted.wait()
        self._ending.close()
        over.set_result(None)

    # Giving up.
    def _break(self) -> None:
        """From any thread. Aborts on one of its own: that frees memory, for which CUDA waits, also for other pairs."""
        with self._state:
            if self._broken:
                return
            self._broken = True
            self._aborting = Thread(target=self._abort, name="nccl-abort", daemon=True)
        # Who waits to be launched gets it, is refused, and hands it on.
        self._slots.release()
        self._aborting.start()

    def _abort(self) -> None:
        """After the last call into NCCL, and in the middle of one that does not end by itself, until it does.

        A communicator that such a call was still making is reached when it is made.
        """
        while not self._calling.acquire(timeout=self._call_s):
            self._abort_group()
        # No other call comes: whoever has the lock now sees that the pair is broken.
        self._calling.release()
        self._abort_group()
        self._aborted.set()

    def _abort_group(self) -> None:
        if self._group is None:
            return
        try:
            self._group.abort()
        except Exception as error:  # noqa: BLE001 - as in `_form`
            log.warning("nccl_abort_failed", reason=str(error))


class NcclLinks:
    """Implements `PairLinks`."""

    max_early = _MAX_EARLY
    max_unmatched_bytes = _MAX_UNMATCHED_BYTES

    def __init__(
        self,
        gpu: Gpu,
        *,
        connect_timeout_s: float = RENDEZVOUS_TIMEOUT.total_seconds(),
        transfer_timeout_s: float = TRANSFER_TIMEOUT.total_seconds(),
        close_timeout_s: float = _CLOSE_S,
    ) -> None:
        self._gpu = gpu
        self._sink = _Sink(gpu)
        self.gpu = gpu.uuid
        self.connect_timeout_s = connect_timeout_s
        self.close_timeout_s = close_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._copying: SerialThread | None = None

    def open(self, name: str) -> NcclLink:
        return NcclLink(self._gpu, self._sink, name, self._transfer_timeout_s)

    def copy(self, source: Buffer, target: Buffer) -> Future[Buffer]:
        """Within the GPU."""
        self._copying = self._copying or SerialThread("nccl-copy")
        copied: Future[Buffer] = Future()
        self._copying.submit(partial(self._copy, source, target, copied))
        return copied

    def close(self) -> Future[None]:
        over: Future[None] = Future()
        copying, self._copying = self._copying, None
        if copying is None:
            over.set_result(None)
        else:
            copying.submit(partial(over.set_result, None))
            copying.close()
        return over

    def _copy(self, source: Buffer, target: Buffer, copied: Future[Buffer]) -> None:
        try:
            flight = self._gpu.copy(source, target)
            while not flight.ended():
                time.sleep(_POLL_S)
        except Exception as error:  # noqa: BLE001 - as in `_form`
            copied.set_exception(error)
        else:
            copied.set_result(target)


def _pass_on(formed: Future[None], hello: Future[Buffer]) -> None:
    error = hello.exception()
    if error is None:
        formed.set_result(None)
    else:
        formed.set_exception(error)
