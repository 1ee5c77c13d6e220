"""The GPU as NCCL links use it: seams for CUDA and tests."""

from __future__ import annotations

from typing import Protocol

from torch._C._distributed_c10d import Store

from kvtransfer.transport.base import Buffer


class LaunchedTransfer(Protocol):
    """A kernel or copy that was launched. Keeps its memory alive."""

    def ended(self) -> bool:
        """Whether it no longer touches its buffer, and what it wrote is there. Raises: RuntimeError."""


class Communicator(Protocol):
    """A NCCL communicator of two ranks, created by the first transfer. Calls raise whatever errors torch has."""

    def send(self, payload: Buffer) -> LaunchedTransfer:
        """Launches a send. Blocks only while the communicator is created."""

    def receive(self, payload: Buffer) -> LaunchedTransfer:
        """Launches a receive. Blocks only while the communicator is created."""

    def abort(self) -> None:
        """Ends all transfers at once and destroys the communicator; blocks meanwhile.

        May be called from any thread, any number of times. It does not stop a communicator from being created.
        """


class Gpu(Protocol):
    """The GPU in whose memory the buffers of a process are."""

    @property
    def uuid(self) -> str:
        """Name, without blanks."""

    def open_communicator(self, store: Store, rank: int) -> Communicator:
        """A communicator with the other process of this store. Does not wait for it. Raises: RuntimeError."""

    def empty(self, num_bytes: int) -> Buffer:
        """Memory of the GPU. Raises: RuntimeError when there is none."""

    def copy(self, source: Buffer, target: Buffer) -> LaunchedTransfer:
        """Launches a copy. Raises: RuntimeError."""
