"""Ways to move KV bytes between processes: siblings behind one small protocol. KV bytes never travel in protobuf."""

from __future__ import annotations

from kvtransfer.transport.base import Buffer, Operation, Peer, Transport
from pdserve.base.config import set_default_variable
from pdserve.base.errors import SetupError

__all__ = ["TRANSPORTS", "Buffer", "Operation", "Peer", "Transport", "open_transport"]

TRANSPORTS = ("ucx", "nccl", "inproc")


def open_transport(name: str, *, host: str = "127.0.0.1", device_memory: bool = False) -> Transport:
    """The transport of that name; `host` is where peers reach this process, for those that open a port.

    With `device_memory` buffers are in a GPU's memory: UCX only.

    Raises: SetupError when it is unknown or its library is not installed.
    """
    # Imported on use: the router imports kvtransfer without having ucxx or torch.
    try:
        if name == "ucx":
            # Importing ucxx sets it, but only after libucx, which it loads before, has read it and then warns.
            set_default_variable("UCX_MEMTYPE_CACHE", "n")
            from kvtransfer.transport.ucx import UcxTransport

            return UcxTransport(device_memory=device_memory)
        if name == "nccl":
            from kvtransfer.transport.nccl import NcclTransport

            return NcclTransport(host=host)
    except ImportError as error:
        raise SetupError(
            f"transport {name!r} needs a library that is not installed ({error}). Install pdserve with an extra: "
            "cpu, cuda12 or cuda13."
        ) from error
    if name == "inproc":
        from kvtransfer.transport.inproc import InprocTransport

        return InprocTransport()
    raise SetupError(f"there is no transport {name!r}; there are {', '.join(TRANSPORTS)}")
