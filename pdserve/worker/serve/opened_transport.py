"""The transport of a worker, opened with the guard, the sockets and the device that its settings give it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvtransfer.transport import LocalTransports, Transport, open_transport
from kvtransfer.transport.local.socket_directory import SocketDirectory
from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.base.timing import timed
from pdserve.peers.peer_tls import PeerTls
from pdserve.peers.seals import Seals
from pdserve.peers.tcp_filter import filter_refusal
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.device import bind_thread, local_gpu
from pdserve.worker.serve.metrics import WorkerMetrics

log = get_logger(__name__)


@asynccontextmanager
async def opened_transport(
    config: WorkerConfig, seals: Seals, tls: PeerTls | None, metrics: WorkerMetrics
) -> AsyncIterator[Transport]:
    """Yields it until the block ends. Raises `SetupError` where this machine lacks what it needs."""
    bind_thread(config)
    device = config.device if config.handover_memory == "device" else None
    guarded = _keeps_strangers_out(config, seals, tls)
    metrics.transport_guarded.set(guarded)
    sockets, gpu = _local_sockets(config), local_gpu(config)
    transport = open_transport(
        config.transport, host=config.host, device=device, guarded=guarded, local_sockets=sockets, local_gpu=gpu
    )
    try:
        prepare = transport.prepare if isinstance(transport, LocalTransports) else transport.listen
        with timed(log, "transport_opened"):
            await prepare()
        yield transport
    finally:
        await transport.close()


def _keeps_strangers_out(config: WorkerConfig, seals: Seals, tls: PeerTls | None) -> bool:
    """Whether UCX is guarded: peers have to prove who they are, and the kernel allows filters.

    Raises: SetupError when the kernel refuses filters, and the guard is required.
    """
    has_peers_known = tls is not None or (seals.secret is not None and not seals.accepts_strangers)
    if config.transport != "ucx" or config.guard_transport == "off" or not has_peers_known:
        return False
    refusal = filter_refusal()
    if not refusal:
        return True
    if config.guard_transport == "require":
        raise SetupError(
            f"The kernel refuses filters on TCP sockets ({os.strerror(refusal)}), which keep strangers from UCX. Give "
            "the worker CAP_NET_ADMIN, or use --guard-transport auto, and let only workers reach its ports."
        )
    log.warning("transport_not_guarded", reason=os.strerror(refusal), remedy="let only workers reach UCX's ports")
    return False


def _local_sockets(config: WorkerConfig) -> SocketDirectory | None:
    """The directory of local sockets; None: this worker uses none. Raises: SetupError for one that was chosen."""
    if not config.uses_local_sockets:
        return None
    if config.local_sockets != "auto":
        return SocketDirectory(Path(config.local_sockets))
    try:
        return SocketDirectory(Path(tempfile.gettempdir()) / f"pdserve-{os.geteuid()}", is_required=False)
    except (SetupError, OSError) as error:
        log.warning("local_sockets_unusable", reason=error)
        return None
