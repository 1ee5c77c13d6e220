"""Options of the UCX context. A variable UCX_<name> of the environment overrides each."""

from __future__ import annotations

from kvtransfer.transport.ucx_devices import devices_of
from pdserve.base.config import variable
from pdserve.base.logs import get_logger

log = get_logger(__name__)

_DEFAULTS = {
    # Everything but shared memory, whose queue a killed peer can jam for all others. Control then goes over TCP.
    "TLS": "^posix,sysv",
    # UCX uses CMA with error handling only if memory can be invalidated for a reader, which this option claims. It
    # cannot: a receiver that still reads a block its sender gave up gets wrong bytes, which the digests detect.
    "CMA_MEMORY_INVALIDATE": "y",
    "KEEPALIVE_INTERVAL": "1s",
    # Connecting does not block the event loop, and sends nothing before UCX is polled again.
    "TCP_CONN_NB": "y",
}
#: Further options for buffers in a GPU's memory. UCX accepts them only where its CUDA module could be loaded.
_CUDA_DEFAULTS = {
    # Receivers read from the sender's memory, as with CMA. By default UCX does so only over NVLink, which two
    # processes on one GPU do not need.
    "CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # Unwanted messages are drained to host memory; UCX would take 512 MiB of the GPU to copy them through.
    "RNDV_FRAG_MEM_TYPES": "host",
}


def options_for(host: str, *, device_memory: bool) -> dict[str, str]:
    """Settings that the user has not made, for a process that listens on `host`.

    `device_memory`: whether buffers are in the memory of this process's GPU.
    """
    defaults = _DEFAULTS | _CUDA_DEFAULTS if device_memory else dict(_DEFAULTS)
    devices = devices_of(host)
    if devices is not None:
        defaults["NET_DEVICES"] = devices
    elif variable("UCX_NET_DEVICES") is None:
        log.warning("ucx_listens_everywhere", host=host, remedy="set UCX_NET_DEVICES")
    return {name: value for name, value in defaults.items() if variable(f"UCX_{name}") is None}
