"""A real GPU for NCCL links: the calls into torch.cuda and torch's NCCL, and nothing else."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupNCCL, Store

from kvtransfer.transport.base import Buffer
from kvtransfer.transport.torch_distributed.pair_link import CONNECTOR_RANK, LISTENER_RANK, RENDEZVOUS_TIMEOUT
from pdserve.base.config import set_default_variable, variable
from pdserve.base.errors import SetupError

#: Variable that torch reads for each group. With it torch starts no watchdog, which would end the process with a peer.
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
#: Variable with the size of torch's flight recorder, whose entries hold CUDA events until the watchdog retires them.
_RECORDED = "TORCH_NCCL_TRACE_BUFFER_SIZE"
#: Torch has 32 streams per priority, which it hands out in turn. Compute and copies use priority 0. A kernel that waits
#: for a dead peer blocks its stream, which with this priority only other pairs may share.
_PAIRS_PRIORITY = -1


class CudaInFlight:
    """Implements `LaunchedTransfer`."""

    def __init__(self, stream: torch.cuda.Stream, *memory: Tensor) -> None:
        """Tracks what was launched on `stream`; `memory` is kept alive."""
        self._event = stream.record_event()
        self._memory = memory

    def ended(self) -> bool:
        return bool(self._event.query())


class CudaCommunicator:
    """Implements `Communicator`: the connector sends, the listener receives."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_PAIRS_PRIORITY)  # type: ignore[no-untyped-call]
        # NCCL's own stream then has the highest priority, and comes from a third set of 32.
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # Bounds neither transfers nor `abort`, which logs after that time and goes on waiting.
        options._timeout = RENDEZVOUS_TIMEOUT
        self._group = ProcessGroupNCCL(store, rank, 2, options)

    def send(self, payload: Buffer) -> CudaInFlight:
        tensor = _tensor_of(payload, self._device)
        with torch.cuda.stream(self._stream):
            # Torch's type stubs do not know that groups send and receive. NCCL has no tags.
            self._group.send([tensor], LISTENER_RANK, 0).block_current_stream()  # type: ignore[attr-defined]
            return CudaInFlight(self._stream, tensor)

    def receive(self, payload: Buffer) -> CudaInFlight:
        tensor = _tensor_of(payload, self._device)
        with torch.cuda.stream(self._stream):
            self._group.recv([tensor], CONNECTOR_RANK, 0).block_current_stream()  # type: ignore[attr-defined]
            return CudaInFlight(self._stream, tensor)

    def abort(self) -> None:
        self._group.abort()


class CudaGpu:
    """Implements `Gpu`."""

    def __init__(self, name: str) -> None:
        """`name`: "cuda" or "cuda:1". Raises `SetupError`."""
        if variable(_NO_WATCHDOG) not in (None, "1"):
            raise SetupError(f"{_NO_WATCHDOG} must be 1 or unset: or torch ends this process when a peer is lost.")
        set_default_variable(_NO_WATCHDOG, "1")
        set_default_variable(_RECORDED, "0")
        if not torch.cuda.is_available():
            raise SetupError(f"--transport nccl cannot have its buffers on {name}: torch finds no CUDA device.")
        self._device = torch.device("cuda", torch.device(name).index or 0)
        # Torch's type stubs lack the uuid.
        self.uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def open_communicator(self, store: Store, rank: int) -> CudaCommunicator:
        return CudaCommunicator(store, rank, self._device)

    def empty(self, num_bytes: int) -> Buffer:
        with torch.cuda.stream(self._copies):
            return cast(Buffer, torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def copy(self, source: Buffer, target: Buffer) -> CudaInFlight:
        ends = _tensor_of(source, self._device), _tensor_of(target, self._device)
        with torch.cuda.stream(self._copies):
            ends[1].copy_(ends[0], non_blocking=True)
            return CudaInFlight(self._copies, *ends)


def _tensor_of(buffer: Buffer, device: torch.device) -> Tensor:
    """A uint8 tensor of the same memory."""
    tensor = torch.as_tensor(buffer, device=device)
    address = cast(Any, buffer).__cuda_array_interface__["data"][0]
    assert tensor.data_ptr() == address, "a buffer on another device would have been copied"
    return tensor
