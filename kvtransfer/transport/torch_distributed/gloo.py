"""The messages of one pair over gloo, in host memory: a process group of two ranks, and the thread that waits in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Work

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.tag_matcher import MAX_EARLY
from kvtransfer.transport.torch_distributed.pair_link import (
    BROKEN_OFF,
    CONNECTOR_RANK,
    LISTENER_RANK,
    RENDEZVOUS_TIMEOUT,
    TRANSFER_TIMEOUT,
    Rendezvous,
)

_AT_ONCE = timedelta(milliseconds=1)
_PAYLOAD_TAG, _FUSE_TAG = 0, 1
_MAX_UNMATCHED_BYTES = 1 << 30


class GlooLink:
    """Implements `PairLink` with a process group of two ranks."""

    def __init__(self, own_host: str, name: str) -> None:
        self._own_host = own_host
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lost = False
        self._group: ProcessGroupGloo | None = None
        #: A receive that no message answers. Its timeout is what breaks the pair off.
        self._fuse: Work | None = None

    def form(self, rendezvous: Rendezvous) -> Future[None]:
        return self._thread.submit(self._form, rendezvous)

    def send(self, payload: Buffer) -> Future[Buffer]:
        return self._thread.submit(self._send, payload)

    def receive(self, payload: Buffer) -> Future[Buffer]:
        return self._thread.submit(self._receive, payload)

    def receive_unmatched(self, num_bytes: int, *, keeps: bool) -> Future[Buffer]:
        # Memory is taken when it is the message's turn: thousands may be announced.
        return self._thread.submit(lambda: self._receive(np.empty(num_bytes, np.uint8)))

    def break_off(self) -> Future[None]:
        """Lets a wait time out, at which gloo closes the connection and wakes waiting threads.

        The wait is for a transfer of its own. Waiting for the thread's transfer could take the completion that the
        thread waits for. A thread that gloo does not wake (sending a message that is partly in the socket) times out.
        """
        self._lost = True
        if self._fuse is not None:
            with contextlib.suppress(RuntimeError):
                self._fuse.wait(_AT_ONCE)
        over = self._thread.submit(lambda: None)
        self._thread.shutdown(wait=False)
        return over

    def join(self) -> None:
        self._thread.shutdown(wait=True)
        self._group = self._fuse = None

    # Jobs of the thread.
    def _form(self, rendezvous: Rendezvous) -> None:
        # Torch's type stubs do not know gloo's options, nor that its groups send and receive.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._own_host)]
        options._timeout = RENDEZVOUS_TIMEOUT
        group = ProcessGroupGloo(rendezvous.open_store(), rendezvous.rank, 2, options)
        other = CONNECTOR_RANK if rendezvous.rank == LISTENER_RANK else LISTENER_RANK
        self._fuse = group.recv([torch.empty(1)], other, _FUSE_TAG)  # type: ignore[attr-defined]
        self._group = group

    def _send(self, payload: Buffer) -> Buffer:
        tensor = torch.from_numpy(payload)
        self._wait_for(lambda group: group.send([tensor], LISTENER_RANK, _PAYLOAD_TAG))  # type: ignore[attr-defined]
        return payload

    def _receive(self, payload: Buffer) -> Buffer:
        tensor = torch.from_numpy(payload)
        self._wait_for(lambda group: group.recv([tensor], CONNECTOR_RANK, _PAYLOAD_TAG))  # type: ignore[attr-defined]
        return payload

    def _wait_for(self, start: Callable[[ProcessGroupGloo], Work]) -> None:
        """Starts a transfer and waits for its end."""
        if self._lost or self._group is None:
            raise RuntimeError(BROKEN_OFF)
        start(self._group).wait(TRANSFER_TIMEOUT)


class GlooLinks:
    """Implements `PairLinks`. `own_host` is the address at which peers reach this process."""

    gpu = ""
    max_early = MAX_EARLY
    max_unmatched_bytes = _MAX_UNMATCHED_BYTES
    connect_timeout_s = None
    close_timeout_s = None

    def __init__(self, own_host: str) -> None:
        self._own_host = own_host

    def open(self, name: str) -> GlooLink:
        return GlooLink(self._own_host, name)

    def copy(self, source: Buffer, target: Buffer) -> Future[Buffer]:
        """Copies at once."""
        copied: Future[Buffer] = Future()
        target[:] = source
        copied.set_result(target)
        return copied

    def close(self) -> Future[None]:
        """Nothing is left to close."""
        over: Future[None] = Future()
        over.set_result(None)
        return over
