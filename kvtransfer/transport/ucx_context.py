"""The UCX context: what UCX finds on this machine. It listens nowhere; workers of the context do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ucxx._lib.libucxx as ucx
from ucxx.exceptions import UCXError

from kvtransfer.transport.ucx_lanes import offered_lanes
from kvtransfer.transport.ucx_options import options_for
from kvtransfer.transport.ucx_worker import UcxWorker
from pdserve.base.errors import SetupError

_CUDA_ADVICE = " This UCX has no CUDA here. Use --handover-memory host."


class UcxContext:
    """The context for one worker at a time. Its calls raise SetupError when UCX does not start here."""

    def __init__(self, host: str, *, device_memory: bool) -> None:
        """`host`: the address on whose network device UCX listens. `device_memory`: buffers are in a GPU's memory."""
        self._host = host
        self._device_memory = device_memory
        self._context: ucx.UCXContext | None = None

    def lanes(self) -> tuple[str, ...]:
        """Transports that UCX has found and that UCX_TLS allows."""
        return offered_lanes(self._opened().info)

    def start_worker(self) -> UcxWorker:
        """Starts a worker, which listens at once."""
        context = self._opened()
        with self._failures_explained():
            return UcxWorker.start(context)

    def close(self) -> None:
        """Closes the context, with its last worker. Later calls open another one."""
        self._context = None

    def _opened(self) -> ucx.UCXContext:
        if self._context is None:
            with self._failures_explained() as options:
                self._context = ucx.UCXContext(options)
        return self._context

    @contextmanager
    def _failures_explained(self) -> Iterator[dict[str, str]]:
        options = options_for(self._host, device_memory=self._device_memory)
        try:
            yield options
        except UCXError as error:
            advice = _CUDA_ADVICE if self._device_memory else ""
            raise SetupError(f"UCX does not start with options {options}: {error}.{advice}") from error
