"""The data address of the `nccl` transport: where its ports are, and the GPU in whose memory its buffers are."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.base.errors import PeerLost

_MAGIC = "pdnccl2"
_HOST_MEMORY = "-"


class DataAddress(NamedTuple):
    """Where somebody listens."""

    host: str
    #: Named over all machines, without blanks; empty: buffers are in host memory.
    gpu: str
    control_port: int
    store_port: int

    def pack(self) -> bytes:
        """As `unpack` reads it."""
        return f"{_MAGIC} {self.host} {self.gpu or _HOST_MEMORY} {self.control_port} {self.store_port}".encode()

    @classmethod
    def unpack(cls, address: bytes) -> DataAddress:
        """Raises: PeerLost when it is not one of ours."""
        parts = address.decode(errors="replace").split(" ")
        if len(parts) != 5 or parts[0] != _MAGIC or not (parts[3].isdecimal() and parts[4].isdecimal()):
            raise PeerLost(f"the data address ({len(address)} bytes) is not one of the nccl transport")
        gpu = "" if parts[2] == _HOST_MEMORY else parts[2]
        return cls(parts[1], gpu, int(parts[3]), int(parts[4]))

    def require_reachable_from(self, gpu: str) -> None:
        """Raises: PeerLost where one side would wait for gloo and one for NCCL, and where NCCL refuses.

        `gpu`: of this process.
        """
        if bool(self.gpu) != bool(gpu):
            there, here = ("a GPU's", "host") if self.gpu else ("host", "a GPU's")
            raise PeerLost(
                f"{self.host} has its buffers in {there} memory, and this process in {here}. Start both tiers with the "
                "same --handover-memory."
            )
        if gpu and self.gpu == gpu:
            raise PeerLost(
                f"NCCL does not connect two processes on one GPU, and {self.host} is on {gpu} as this process is. Use "
                "--transport ucx on both tiers, or give each worker a GPU of its own."
            )
