"""The UCX context: what UCX finds on this machine. It listens nowhere; workers of the context do."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import ucxx._lib.libucxx as ucx
from ucxx.exceptions import UCXError

from kvtransfer.transport.ucx_lanes import offered_lanes
from kvtransfer.transport.ucx_options import options_for
from kvtransfer.transport.ucx_worker import UcxWorker
from pdserve.base.config import variable
from pdserve.base.errors import SetupError
from pdserve.observe.open_files import num_free

#: Free files for a worker, and for looking at its sockets.
_NEEDED_FILES = 16
#: A value of UCX_TCP_PORT_RANGE; UCX itself refuses others.
_PORT_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_CUDA_ADVICE = " This UCX has no CUDA here. Use --handover-memory host."


class UcxContext:
    """The context for one worker at a time. Its calls raise SetupError when UCX does not start, or has no file."""

    def __init__(self, host: str, *, device_memory: bool) -> None:
        """`host`: the address on whose network device UCX listens. `device_memory`: buffers are in a GPU's memory."""
        self._host = host
        self._device_memory = device_memory
        self._options: dict[str, str] = {}
        self._context: ucx.UCXContext | None = None
        self._lanes: tuple[str, ...] = ()

    def lanes(self) -> tuple[str, ...]:
        """Transports that UCX has found and that UCX_TLS allows."""
        self._opened()
        return self._lanes

    def start_worker(self, listening: AbstractContextManager[None]) -> UcxWorker:
        """Starts a worker, which listens at once, within `listening`. It is not tried where files are scarce."""
        context = self._opened()
        with self._failures_explained():
            if self._host_has_no_port():
                raise OSError(errno.EADDRINUSE, f"all ports of UCX_TCP_PORT_RANGE are in use at {self._host}")
            if num_free(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _NEEDED_FILES:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            with listening:
                return UcxWorker.start(context)

    def close(self) -> None:
        """Closes the context, with its last worker. Later calls open another one."""
        self._context = None

    def _opened(self) -> ucx.UCXContext:
        if self._context is None:
            with self._failures_explained():
                self._options = options_for(self._host, device_memory=self._device_memory)
                try:
                    context = ucx.UCXContext(dict(self._options))
                except UCXError as error:
                    raise SetupError(self._failure(error) + (_CUDA_ADVICE if self._device_memory else "")) from error
                self._lanes = offered_lanes(context.info)
                self._context = context
        return self._context

    def _host_has_no_port(self) -> bool:
        """Whether UCX would look for a port for ever. It is not known where UCX listens at other devices than ours."""
        ports = variable("UCX_TCP_PORT_RANGE")
        found = _PORT_RANGE.fullmatch(ports or "")
        if found is None or "NET_DEVICES" not in self._options:
            return False
        first, last = int(found[1]), int(found[2] or found[1])
        return first > 0 and not any(_can_listen(self._host, port) for port in range(first, last + 1))

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        try:
            yield
        except (UCXError, OSError) as error:
            raise SetupError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        return f"UCX does not start with options {self._options}: {error}."


def _can_listen(host: str, port: int) -> bool:
    """Whether the port is not in use; ports that cannot be used for other reasons are for UCX to refuse."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True
