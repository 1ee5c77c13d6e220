"""Tells whether a UCX worker of this process can still be reached through shared memory.

All local peers write into one queue of the receiving worker, reserving a slot first and filling it afterwards. A
process killed in between leaves a slot that never becomes ready, and with it everything behind it, whoever sent that:
UCX has no cure. So a worker that is waited for without anything moving gets a message from a second worker of its own
process.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

PING_BYTES = 1


class Canary:
    """A second UCX worker with the same settings, connected to the one to be watched."""

    def __init__(self, options: Mapping[str, str], worker_address: bytes) -> None:
        context = ucx.UCXContext(dict(options))
        self._worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        address = ucx.UCXAddress.create_from_buffer(worker_address)
        self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        self._ping: tuple[ucx.UCXRequest, Array] | None = None

    def ping(self, tag: int) -> None:
        """Sends one message of `PING_BYTES`."""
        array = Array(np.zeros(PING_BYTES, np.uint8))
        self._ping = self._endpoint.tag_send(array, ucx.UCXXTag(tag)), array

    def progress(self) -> bool:
        """Whether anything moved."""
        return bool(self._worker.progress_once())
