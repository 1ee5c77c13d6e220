"""Transports under test, by name, in this process and in others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvtransfer.transport import LocalTransports, Transport, open_transport
from kvtransfer.transport.local.socket_directory import SocketDirectory
from kvtransfer.transport.path import DataEndpoint
from kvtransfer.transport.torch_distributed.nccl import NcclLinks
from kvtransfer.transport.torch_distributed.transport import TorchDistributedTransport
from pdserve.base.shared_memory import SharedMemory
from pdserve.peers.host_identity import own_host_identity
from tests.support.pretend_gpu import PretendGpu

#: The `nccl` transport between GPUs, with a stand-in for the GPUs.
BETWEEN_GPUS = "nccl between GPUs"
#: The same with real GPUs: this process uses the first, other processes the second.
ON_TWO_GPUS = "nccl on two GPUs"
#: UCX together with offers within the host, as workers have it.
WITH_LOCAL = "ucx with local"


def open_any(name: str, *, device: str | None = None) -> Transport:
    """A transport of the product, or one of those above."""
    match name:
        case "nccl between GPUs":
            return TorchDistributedTransport(NcclLinks(PretendGpu()))
        case "nccl on two GPUs":
            return open_transport("nccl", device="cuda:0")
        case "ucx with local":
            return open_transport("ucx", local_sockets=socket_directory())
        case _:
            return open_transport(name, device=device)


def socket_directory() -> SocketDirectory:
    """Where the processes of these tests find each other."""
    return SocketDirectory(Path(tempfile.gettempdir()) / f"pdserve-tests-{os.getuid()}")


def endpoint_of(transport: Transport, memory: SharedMemory) -> DataEndpoint | None:
    """The transport's end in tickets, where it exchanges messages with processes of its host; they see `memory`."""
    if not isinstance(transport, LocalTransports):
        return None
    transport.share(memory)
    return DataEndpoint(host=own_host_identity(), lanes=(), local=transport.local_address)
