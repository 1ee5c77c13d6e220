"""What `pdserve doctor` gathers from a running cluster, and which pairs of workers it tests. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.observe.facts.cluster import WorkerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """The router about itself."""

    base_url: str
    is_ready: bool
    #: Why it is not ready; empty when it is.
    reason: str
    #: Reasons for degraded service, by subject.
    degraded: Mapping[str, str]
    version: str
    has_redis: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorker:
    """A worker as the router lists it, and what it reports about itself."""

    worker_id: str
    tier: str
    is_ready: bool
    grpc_address: str
    epoch: int = 0
    #: None: it did not answer, or was not called because there are too many.
    facts: WorkerFacts | None = None
    #: Why it did not answer; empty when it did.
    error: str = ""
    #: Seconds by which its clock is ahead of the one here, and how far that may be wrong.
    clock_skew_s: float = 0.0
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProbe:
    """A test transfer from a prefill worker to a decode worker."""

    prefill: str
    decode: str
    num_bytes: int = 0
    #: The best of several rounds.
    bytes_per_s: float = 0.0
    #: Speed of a plain copy on the receiving machine.
    memory_copy_bytes_per_s: float = 0.0
    #: Paths, with the cause and remedy of a slow one; empty: unknown.
    expected: str = ""
    actual: str = ""
    cause: str = ""
    remedy: str = ""
    #: How UCX sends large messages, in its words; empty: unknown.
    protocol: str = ""
    #: Why it failed; empty when it did not.
    error: str = ""
    #: Whether the workers were busy the whole time.
    is_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A running cluster."""

    router: RouterFacts
    workers: tuple[SeenWorker, ...]
    pairs: tuple[PairProbe, ...]
    #: All pairs of ready workers, tested or not.
    num_pairs: int


def choose_pairs(prefill: Sequence[str], decode: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """Pairs to test, at most `limit`: all of them, or a sample in which each worker appears as evenly as possible."""
    if len(prefill) * len(decode) <= limit:
        return [(sender, receiver) for sender in prefill for receiver in decode]
    pairs: dict[tuple[str, str], None] = {}
    shift = 0
    while len(pairs) < limit:
        # A round takes each worker of the larger tier once; the next one shifts their partners.
        for index in range(max(len(prefill), len(decode))):
            pairs[prefill[index % len(prefill)], decode[(index + shift) % len(decode)]] = None
        shift += 1
    return list(pairs)[:limit]
