"""The cluster as this router sees it: workers, their cached prefixes, the work placed on them, and channels to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.base.block_hash import hash_blocks, hash_key
from pdserve.base.ids import BlockHash, Epoch, RequestId, WorkerId, new_router_id
from pdserve.base.layout import KvLayout
from pdserve.net.rpc import ChannelPool
from pdserve.peers.peer_tls import PeerTls
from pdserve.peers.registry import WorkerDirectory
from pdserve.peers.seals import Message, Purpose, Seals, receiver_name
from pdserve.peers.workers import Tier, WorkerRecord
from pdserve.v1.decode_pb2 import DecodeResponse
from router_svc.routing.in_flight import InFlight
from router_svc.routing.placement import Demand, uncached_tokens
from router_svc.routing.silence import SilenceLimits
from router_svc.routing.stream_pool import StreamPool
from router_svc.routing.timeouts import TimeoutLimits

TIERS: tuple[Tier, ...] = ("prefill", "decode")
#: Longer prompts are hashed in a thread: a block takes about 2 us.
_INLINE_HASH_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """Settings that decide where requests go and how long they may wait for workers."""

    model_name: str
    #: Commit of the model's repository; None for a model that is of no hub.
    model_revision: str | None = None
    local_prefill_threshold: int
    #: Whether decode workers also prefill longer prompts when that is clearly sooner.
    local_prefill_by_load: bool
    #: Whether the cluster is configured with prefill workers.
    expects_prefill: bool
    reserve_timeout_s: float
    #: Time for which a tier without a ready worker is expected to have one again.
    worker_return_timeout_s: float = 60.0
    #: Workers that one request may lose, whatever ends them.
    max_lost_workers: int = 100
    #: Whether an answer that has begun may go on with workers that compute other bits, where no others are left.
    may_change_numerics: bool = True
    timeouts: TimeoutLimits = field(default_factory=TimeoutLimits)
    silence: SilenceLimits
    #: Whether the router serves other models, too, so that errors have to say of which one they are.
    is_one_of_several: bool = False

    @property
    def no_decode_worker(self) -> str:
        """The error when no decode worker is ready."""
        whose = f" of the model `{self.model_name}`" if self.is_one_of_several else ""
        return f"No decode worker{whose} is ready. Retry in a few seconds."


class PrefixHashes:
    """The block hashes of one prompt, computed once for each KV layout and numerics class that workers have."""

    def __init__(self, prompt: Sequence[int], salt: bytes) -> None:
        self.num_tokens = len(prompt)
        self._prompt = prompt
        self._salt = salt
        self._by_arithmetic: dict[tuple[KvLayout, str], list[BlockHash]] = {}

    async def of(self, layout: KvLayout, numerics_class: str) -> list[BlockHash]:
        """The hashes that workers with this layout and of this class publish."""
        arithmetic = layout, numerics_class
        if arithmetic not in self._by_arithmetic:
            self._by_arithmetic[arithmetic] = await _hashes(layout, numerics_class, self._prompt, self._salt)
        return self._by_arithmetic[arithmetic]


async def _unknown(worker_id: WorkerId, epoch: Epoch) -> frozenset[RequestId] | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers of one model, and everything that all requests share to reach workers."""

    policy: RoutingPolicy
    directory: WorkerDirectory
    #: Leading blocks that each worker has cached, from the hashes of a prompt's blocks.
    index: Callable[[Sequence[BlockHash]], Mapping[WorkerId, int]]
    #: The requests in the last step of a worker that has failed by itself, or None: see `requests_of_death`.
    requests_of_death: Callable[[WorkerId, Epoch], Awaitable[frozenset[RequestId] | None]] = _unknown
    channels: ChannelPool = field(default_factory=ChannelPool)
    #: Certificates for connections to the workers; None: no TLS.
    tls: PeerTls | None = None
    #: Connections to decode workers.
    streams: StreamPool[DecodeResponse] = field(default_factory=lambda: StreamPool(DecodeResponse.FromString))
    #: Seals of the messages to the workers.
    seals: Seals = field(default_factory=Seals)
    in_flight: InFlight = field(default_factory=lambda: InFlight(new_router_id()))

    def workers_of(self, tier: Tier) -> list[WorkerRecord]:
        """All workers of the tier that serve the model and are not known to be lost. Some may not be `ready`."""
        return [worker for worker in self.directory.workers_of(tier) if worker.model == self.policy.model_name]

    def ready(self, tier: Tier, layout: KvLayout | None = None) -> list[WorkerRecord]:
        """Workers of the tier that serve the model and accept requests: those with `layout`, or all."""
        return [worker for worker in self.workers_of(tier) if worker.ready and layout in (None, worker.layout)]

    def expects(self, tier: Tier) -> bool:
        """Whether a worker of the tier is expected back, because one was ready a short time ago."""
        return self.directory.was_ready_within(tier, self.policy.model_name, self.policy.worker_return_timeout_s)

    @property
    def without_decode(self) -> str:
        """A clause for the error of a request that is out of time; empty while a decode worker is ready."""
        return "" if self.ready("decode") else ", and no decode worker is ready"

    def sealed(self, purpose: Purpose, worker: WorkerRecord, message: Message) -> Message:
        """The message to send to this worker in place of `message`."""
        return self.seals.seal(purpose, receiver_name(worker.worker_id, worker.epoch), message)

    @property
    def unpaired_decode(self) -> list[WorkerId]:
        """Decode workers with a KV layout that no ready prefill worker has, although there are prefill workers."""
        layouts = {worker.layout for worker in self.ready("prefill")}
        return [worker.worker_id for worker in self.ready("decode") if layouts and worker.layout not in layouts]

    @property
    def slow_path(self) -> str | None:
        """Why blocks take a slower path than expected, for the first worker that reports one; None: none does."""
        workers = [worker for tier in TIERS for worker in self.workers_of(tier)]
        slow = [worker for worker in workers if worker.transport.degraded is not None]
        if not slow:
            return None
        others = f" ({len(slow) - 1} more workers)" if len(slow) > 1 else ""
        return f"{slow[0].worker_id}{others} {slow[0].transport.degraded}"

    @property
    def decode_capacity(self) -> int:
        """Sequences that the decode tier can run concurrently."""
        return sum(worker.max_num_seqs for worker in self.ready("decode"))

    def max_model_len(self, default: int) -> int:
        """The longest sequence that every worker can hold; `default` while no worker is ready."""
        return min((worker.max_model_len for tier in TIERS for worker in self.ready(tier)), default=default)

    async def overlap(self, hashes: PrefixHashes) -> dict[WorkerId, int]:
        """Leading blocks of the prompt that each worker has cached, according to the index."""
        found: dict[WorkerId, int] = {}
        workers = [worker for tier in TIERS for worker in self.ready(tier)]
        for layout, numerics in {(worker.layout, worker.numerics_class) for worker in workers}:
            holders = self.index(await hashes.of(layout, numerics))
            found |= {
                worker.worker_id: holders[worker.worker_id]
                for worker in workers
                if (worker.layout, worker.numerics_class) == (layout, numerics) and worker.worker_id in holders
            }
        return found

    async def uncached_tokens(self, hashes: PrefixHashes) -> int:
        """Prompt tokens left to compute where most are cached: on a prefill worker, or without any, on a decode one."""
        demand = Demand(prompt_tokens=hashes.num_tokens, sequences=1, overlap=await self.overlap(hashes))
        workers = self.ready("prefill") or self.ready("decode")
        return min((uncached_tokens(worker, demand) for worker in workers), default=hashes.num_tokens)


async def _hashes(layout: KvLayout, numerics: str, prompt: Sequence[int], salt: bytes) -> list[BlockHash]:
    size = layout.block_size
    key = hash_key(model=layout.model, dtype=layout.dtype, block_size=size, salt=salt, numerics_class=numerics)
    if len(prompt) <= _INLINE_HASH_TOKENS:
        return hash_blocks(key, prompt, layout.block_size)
    return await asyncio.to_thread(hash_blocks, key, prompt, layout.block_size)
