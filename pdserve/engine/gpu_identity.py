"""Which GPU a process uses, as other processes of its host name it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GpuIdentity(NamedTuple):
    """A GPU, or a part of one (MIG). UUIDs are equal in all processes and containers that see it."""

    #: Its own UUID; empty: the process computes on a CPU.
    uuid: str
    #: UUIDs of the GPUs whose memory it reads: itself, and its peers among those that this process sees.
    readable: frozenset[str]


NO_GPU = GpuIdentity("", frozenset())


def gpu_identity(device: torch.device) -> GpuIdentity:
    """The GPU of that device."""
    if device.type != "cuda":
        return NO_GPU
    own, count = device.index or 0, torch.cuda.device_count()
    peers = [other for other in range(count) if other == own or torch.cuda.can_device_access_peer(own, other)]
    return GpuIdentity(_uuid_of(own), frozenset(map(_uuid_of, peers)))


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
