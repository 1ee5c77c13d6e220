"""Transports, which move KV bytes between processes behind one small protocol. KV bytes never travel in protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.transport.base import (
    Buffer,
    GuardedTransport,
    LaneReporter,
    Operation,
    Peer,
    Transport,
)
from kvtransfer.transport.offers import LocalTransports
from pdserve.base.config import set_default_variable
from pdserve.base.errors import SetupError

if TYPE_CHECKING:
    from kvtransfer.transport.local.socket_directory import SocketDirectory
    from kvtransfer.transport.torch_distributed.pair_link import PairLinks
    from kvtransfer.transport.ucx import UcxTransport

__all__ = [
    "TRANSPORTS",
    "Buffer",
    "GuardedTransport",
    "LaneReporter",
    "LocalTransports",
    "Operation",
    "Peer",
    "Transport",
    "open_transport",
]

TRANSPORTS = ("ucx", "nccl", "inproc")


def open_transport(
    name: str,
    *,
    host: str = "127.0.0.1",
    device: str | None = None,
    guarded: bool = False,
    local_sockets: SocketDirectory | None = None,
    local_gpu: int | None = None,
) -> Transport:
    """The transport of that name.

    `host` is the address at which peers reach this process, for transports that open a port. Buffers are in the memory
    of the GPU `device` ("cuda" or "cuda:1", for UCX and NCCL); None: in host memory. `guarded`: whether a
    `GuardedTransport` keeps strangers out. `local_sockets`: the directory in which processes of this host find each
    other, to copy blocks from each other instead of using UCX; None: they use UCX, too. `local_gpu`: the number of the
    GPU that has this process's blocks; None: they are in host memory.
    Raises: SetupError when it is unknown, its library is not installed, or the machine lacks what it needs.
    """
    # Imported on use: the router imports kvtransfer without having ucxx or torch.
    try:
        if name == "ucx":
            ucx = _open_ucx(host, device, guarded=guarded)
            return ucx if local_sockets is None else _with_local(ucx, local_sockets, local_gpu)
        if name == "nccl":
            from kvtransfer.transport.torch_distributed.transport import TorchDistributedTransport

            return TorchDistributedTransport(_pair_links(host, device), host=host)
    except ImportError as error:
        raise SetupError(
            f"Transport {name!r} needs a library that is not installed ({error}). Install pdserve with an extra: "
            "cpu, cuda12 or cuda13."
        ) from error
    if name == "inproc":
        from kvtransfer.transport.inproc import InprocTransport

        return InprocTransport()
    raise SetupError(f"There is no transport {name!r}. Use one of {', '.join(TRANSPORTS)}.")


def _open_ucx(host: str, device: str | None, *, guarded: bool) -> UcxTransport:
    # Importing ucxx sets it too, but only after loading libucx, which by then has read it and warns.
    set_default_variable("UCX_MEMTYPE_CACHE", "n")
    from kvtransfer.transport.ucx import UcxTransport

    return UcxTransport(host=host, device_memory=device is not None, guarded=guarded)


def _with_local(ucx: UcxTransport, sockets: SocketDirectory, gpu: int | None) -> Transport:
    from kvtransfer.transport.local.exchange import LocalExchange
    from kvtransfer.transport.with_local import WithLocal

    return WithLocal(ucx, LocalExchange(sockets, gpu))


def _pair_links(host: str, device: str | None) -> PairLinks:
    if device is None:
        from kvtransfer.transport.torch_distributed.gloo import GlooLinks

        return GlooLinks(host)
    from kvtransfer.transport.torch_distributed.cuda import CudaGpu
    from kvtransfer.transport.torch_distributed.nccl import NcclLinks

    return NcclLinks(CudaGpu(device))
