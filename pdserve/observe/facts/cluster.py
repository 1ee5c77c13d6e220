"""Facts about a running cluster, as its processes report them to `pdserve doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.layout import KvLayout
from pdserve.observe.facts.machine import MachineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """One Redis as seen from one process. Empty texts and zeros are unknown: the user may not run INFO."""

    address: str
    #: Why it cannot be used; empty when it can.
    error: str = ""
    version: str = ""
    #: Shortest of several round trips.
    latency_s: float = 0.0
    used_memory_bytes: int = 0
    #: 0: no limit.
    max_memory_bytes: int = 0
    eviction: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker about itself."""

    worker_id: str
    tier: str
    layout: KvLayout
    transport: str
    device: str
    kernels: str
    instruction_set: str
    #: Its clock when it answered, in seconds since 1970.
    unix_time_s: float
    machine: MachineFacts
    redis: RedisFacts
