"""Messages between GPUs over NCCL: how the transfers of one pair are launched, waited for and aborted.

A transfer is a kernel that waits for the other process's kernel. One thread launches transfers and another waits for
their end, so that the next one is queued when one ends. Only aborting the whole communicator ends a kernel whose peer
does not come; until then its buffer is in use. Decision 26 describes what torch and NCCL do in that case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Event, Lock, Semaphore, Thread

from torch._C._distributed_c10d import Store

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.torch_distributed.gpu import Communicator, Gpu, LaunchedTransfer
from kvtransfer.transport.torch_distributed.pair_link import (
    BROKEN_OFF,
    CONNECTOR_RANK,
    LISTENER_RANK,
    RENDEZVOUS_TIMEOUT,
    TRANSFER_TIMEOUT,
    Rendezvous,
)
from kvtransfer.transport.torch_distributed.serial_thread import SerialThread
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Transfers launched ahead: enough to hide launches and polling, few enough that NCCL's queue never blocks.
_MAX_LAUNCHED = 4
#: Interval of polls, about the duration of a 32 MiB message. CUDA has no wait with a timeout or a wake-up.
_POLL_S = 1e-4
#: Interval of polls. The store has no wait that can be woken up.
_MEET_POLL_S = 0.01
#: Time after which a call into NCCL must be waiting for the peer.
_CALL_S = 1.0
#: The same for the first call, which creates the communicator. An abort cannot stop that, and must not run while torch
#: registers the communicator.
_CREATE_S = RENDEZVOUS_TIMEOUT.total_seconds()
#: Limit for threads to end after everything was aborted.
_CLOSE_S = 5.0
#: Messages without an inbox that are kept, whose memory is not budgeted. They are strays.
_MAX_EARLY = 8
#: Room for two of the largest bundles of blocks (`kvtransfer/handover/staging.py`).
_MAX_UNMATCHED_BYTES = 64 << 20


class _DiscardBuffer:
    """Memory for unwanted messages of all pairs, which overwrite each other."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._memory: Buffer | None = None
        self._growing = Lock()

    def of(self, num_bytes: int) -> Buffer:
        """Memory for a message. Raises what `Gpu.empty` does."""
        with self._growing:
            if self._memory is None or self._memory.nbytes < num_bytes:
                self._memory = self._gpu.empty(num_bytes)
            return self._memory[:num_bytes]


class NcclLink:
    """Implements `PairLink` with a communicator of two ranks."""

    def __init__(self, gpu: Gpu, discard: _DiscardBuffer, name: str, transfer_timeout_s: float) -> None:
        self._gpu = gpu
        self._discard = discard
        self._transfer_timeout_s = transfer_timeout_s
        self._launching, self._ending = SerialThread(f"{name}-launch"), SerialThread(f"{name}-end")
        self._slots = Semaphore(_MAX_LAUNCHED)
        #: Launches a send or a receive, depending on the rank.
        self._start: Callable[[Buffer], LaunchedTransfer] | None = None
        self._communicator: Communicator | None = None
        #: Held during calls into NCCL: an abort frees the communicator.
        self._calling = Lock()
        #: Time that an abort waits for a call to end.
        self._call_s = _CREATE_S
        self._state = Lock()
        self._broken = False
        self._aborting: Thread | None = None
        self._aborted = Event()

    def form(self, rendezvous: Rendezvous) -> Future[None]:
        """Sends a first message, so that the communicator and its memory exist before the first block."""
        formed: Future[None] = Future()
        self._launching.submit(partial(self._form, rendezvous, formed))
        return formed

    def send(self, payload: Buffer) -> Future[Buffer]:
        return self._submit(lambda: payload)

    receive = send

    def receive_unmatched(self, num_bytes: int, *, keeps: bool) -> Future[Buffer]:
        return self._submit(partial(self._gpu.empty if keeps else self._discard.of, num_bytes))

    def break_off(self) -> Future[None]:
        self._break()
        over: Future[None] = Future()
        self._launching.submit(partial(self._ending.submit, partial(self._finish, over)))
        self._launching.close()
        return over

    def join(self) -> None:
        for thread in (self._launching, self._ending, self._aborting):
            assert thread is not None, "a link is broken off before it is joined"
            thread.join()

    def _submit(self, memory: Callable[[], Buffer]) -> Future[Buffer]:
        done: Future[Buffer] = Future()
        self._launching.submit(partial(self._launch, memory, done, self._transfer_timeout_s))
        return done

    # Jobs of the launching thread.
    def _form(self, rendezvous: Rendezvous, formed: Future[None]) -> None:
        try:
            store = rendezvous.open_store()
            self._communicator = communicator = self._gpu.open_communicator(store, rendezvous.rank)
            first = self._gpu.empty(1)
            self._meet(store, rendezvous.rank)
        except Exception as error:  # noqa: BLE001 - torch raises ValueError and TypeError too; the future reports it
            formed.set_exception(error)
            return
        self._start = communicator.send if rendezvous.rank == CONNECTOR_RANK else communicator.receive
        hello: Future[Buffer] = Future()
        hello.add_done_callback(partial(_pass_on, formed))
        self._launch(lambda: first, hello, RENDEZVOUS_TIMEOUT.total_seconds())
        self._call_s = _CALL_S

    def _meet(self, store: Store, rank: int) -> None:
        """Waits until both processes are ready: a wait in NCCL for one that does not come cannot be interrupted."""
        until = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
        other = LISTENER_RANK if rank == CONNECTOR_RANK else CONNECTOR_RANK
        store.set(f"here/{rank}", "")
        while not store.check([f"here/{other}"]):
            if self._broken:
                raise RuntimeError(BROKEN_OFF)
            if time.monotonic() > until:
                raise RuntimeError(
                    f"The other process did not join the NCCL pair within {RENDEZVOUS_TIMEOUT.total_seconds():g} s. "
                    "Look whether it runs, and whether it reaches the port of this process's store."
                )
            time.sleep(_MEET_POLL_S)

    def _launch(self, memory: Callable[[], Buffer], done: Future[Buffer], timeout_s: float) -> None:
        self._slots.acquire()
        payload = None
        try:
            with self._calling:
                if self._broken or self._start is None:
                    raise RuntimeError(BROKEN_OFF)
                payload = memory()
                transfer = self._start(payload)
        except Exception as error:  # noqa: BLE001 - as in `_form`
            self._break()
            if payload is None:  # NCCL has not seen the buffer, so it is free at once.
                self._slots.release()
                done.set_exception(error)
            else:
                self._ending.submit(partial(self._fail, error, done))
        else:
            self._ending.submit(partial(self._end, transfer, payload, done, timeout_s))

    # Jobs of the ending thread.
    def _end(self, transfer: LaunchedTransfer, payload: Buffer, done: Future[Buffer], timeout_s: float) -> None:
        try:
            self._wait_for(transfer, timeout_s)
        except Exception as error:  # noqa: BLE001 - as in `_form`
            self._break()
            self._fail(error, done)
            return
        self._slots.release()
        # An aborted transfer ends like one that succeeded.
        if self._broken:
            done.set_exception(RuntimeError(BROKEN_OFF))
        else:
            done.set_result(payload)

    def _wait_for(self, transfer: LaunchedTransfer, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not transfer.ended():
            if time.monotonic() > until and not self._broken:
                log.warning("nccl_pair_broken", reason="a message timed out", after_s=timeout_s)
                self._break()
            time.sleep(_POLL_S)

    def _fail(self, error: Exception, done: Future[Buffer]) -> None:
        """Fails a transfer after the abort, for NCCL may use its buffer until then."""
        self._aborted.wait()
        done.set_exception(error)

    def _finish(self, over: Future[None]) -> None:
        self._aborted.wait()
        self._ending.close()
        over.set_result(None)

    # Aborting, on a thread of its own.
    def _break(self) -> None:
        """Aborts, from any thread, on a new thread: CUDA frees memory only when other pairs' kernels have ended."""
        with self._state:
            if self._broken:
                return
            self._broken = True
            self._aborting = Thread(target=self._abort, name="nccl-abort", daemon=True)
        # A launch that waits for this slot gets it, is refused, and releases it for the next.
        self._slots.release()
        self._aborting.start()

    def _abort(self) -> None:
        """Aborts after the last call into NCCL, and repeatedly during a call that does not end by itself.

        If that call is creating the communicator, the abort takes effect once it exists.
        """
        while not self._calling.acquire(timeout=self._call_s):
            self._abort_communicator()
        # No other call follows: a thread that takes the lock from now on sees that the pair is broken.
        self._calling.release()
        self._abort_communicator()
        self._aborted.set()

    def _abort_communicator(self) -> None:
        if self._communicator is None:
            return
        try:
            self._communicator.abort()
        except Exception as error:  # noqa: BLE001 - as in `_form`
            log.warning("nccl_abort_failed", reason=str(error))


class NcclLinks:
    """Implements `PairLinks` on one GPU."""

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
        self._discard = _DiscardBuffer(gpu)
        self.gpu = gpu.uuid
        self.connect_timeout_s = connect_timeout_s
        self.close_timeout_s = close_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._copying: SerialThread | None = None

    def open(self, name: str) -> NcclLink:
        return NcclLink(self._gpu, self._discard, name, self._transfer_timeout_s)

    def copy(self, source: Buffer, target: Buffer) -> Future[Buffer]:
        """Copies within the GPU."""
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
            transfer = self._gpu.copy(source, target)
            while not transfer.ended():
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
