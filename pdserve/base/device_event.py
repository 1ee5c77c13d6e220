"""The interface of a device event: a point in a device's work, after which certain memory is written."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class DeviceEvent(Protocol):
    """An event such as `torch.cuda.Event`. `None` in its place means that the event has already occurred."""

    def wait(self) -> None:
        """Makes later launches of the calling thread, on its current stream, start after the event. Does not block."""


@runtime_checkable
class HostVisibleEvent(DeviceEvent, Protocol):
    """A device event that the host, too, can wait for."""

    def query(self) -> bool:
        """Whether it has occurred."""

    def synchronize(self) -> None:
        """Blocks the calling thread until it has occurred."""
