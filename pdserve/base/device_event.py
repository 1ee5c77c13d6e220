"""A moment in the work of a device, which the engine knows and whoever moves blocks has to wait for."""

from __future__ import annotations

from typing import Protocol


class DeviceEvent(Protocol):
    """As `torch.cuda.Event`. Where `None` is said instead, the moment is over."""

    def wait(self) -> None:
        """What the calling thread launches from now on, on its present stream, begins after it. Does not block."""
