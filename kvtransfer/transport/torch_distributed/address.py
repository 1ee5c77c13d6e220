"""The data address of the `nccl` transport: its host and ports, and the GPU that holds its buffers."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.base.errors import PeerLost

_MAGIC = "pdnccl2"
_HOST_MEMORY = "-"


class DataAddress(NamedTuple):
    """Address of a listening transport."""

    host: str
    #: Name of the GPU that holds the buffers, unique over all machines, without blanks; empty: host memory.
    gpu: str
    control_port: int
    store_port: int

    def pack(self) -> bytes:
        """The address as bytes, which `unpack` reads."""
        return f"{_MAGIC} {self.host} {self.gpu or _HOST_MEMORY} {self.control_port} {self.store_port}".encode()

    @classmethod
    def unpack(cls, address: bytes) -> DataAddress:
        """Reads an address. Raises: PeerLost when it is not one of this transport."""
        fields = address.decode(errors="replace").split(" ")
        if len(fields) != 5 or fields[0] != _MAGIC or not (_is_port(fields[3]) and _is_port(fields[4])):
            raise PeerLost(f"The data address ({len(address)} bytes) is not one of the nccl transport.")
        _, host, gpu, control_port, store_port = fields
        return cls(host, "" if gpu == _HOST_MEMORY else gpu, int(control_port), int(store_port))

    def require_reachable_from(self, gpu: str) -> None:
        """Checks that a process with its buffers on `gpu` can connect.

        Raises: PeerLost when one side would use gloo and the other NCCL, or both are on one GPU, which NCCL refuses.
        """
        if bool(self.gpu) != bool(gpu):
            theirs, ours = ("GPU", "host") if self.gpu else ("host", "GPU")
            raise PeerLost(
                f"{self.host} has its buffers in {theirs} memory and this process in {ours} memory. "
                "Start both tiers with the same --handover-memory."
            )
        if gpu and self.gpu == gpu:
            raise PeerLost(
                f"NCCL does not connect two processes on one GPU: {self.host} and this process are both on {gpu}. "
                "Use --transport ucx on both tiers, or give each worker a GPU of its own."
            )


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65_536
