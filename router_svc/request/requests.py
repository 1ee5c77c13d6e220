"""All requests for one model: refuses those it cannot serve, and runs one task for each prompt of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from pdserve.base.errors import Draining, Forbidden, NoWorkers, Quarantined, RateLimited, RequestError
from pdserve.base.tasks import ServiceGroup, freed_in_turns, in_turns, service_group
from pdserve.base.trace_context import TraceContext
from pdserve.model.tokenizer import Tokenizer
from pdserve.observe.tracing.spans import NO_TRACER, Tracer
from router_svc.generation import BATCH_PRIORITY, Generation
from router_svc.records.events import Ended
from router_svc.records.journal import Journal
from router_svc.records.metrics import RouterMetrics
from router_svc.records.recent_records import RecentRecords
from router_svc.records.record import Record
from router_svc.records.request_store import RequestStore
from router_svc.records.spans import RequestTrace
from router_svc.records.stream_log import StreamLog
from router_svc.records.stream_logs import StreamLogs
from router_svc.records.usage import Account, Usage
from router_svc.records.usage_store import UsageStore
from router_svc.request.admission import Entrant
from router_svc.request.client import ANONYMOUS, Client
from router_svc.request.fair_order import QueueSlot
from router_svc.request.gate import Gate
from router_svc.request.limiter import Limiter
from router_svc.request.limits import size
from router_svc.request.open_requests import OpenRequest
from router_svc.request.prompt_log import PromptLog
from router_svc.request.prompt_task import PromptTask
from router_svc.request.quarantine import Quarantine
from router_svc.request.run_log import RunLog, usage_of_all
from router_svc.request.stream import DeltaStream
from router_svc.request.waves import Start, Waves
from router_svc.routing.cluster import Cluster, PrefixHashes

#: What the key of the digests of refused requests is for.
_REFUSED = "refused_requests"


_NO_USAGE = Usage()
_Prompt = tuple[Generation, PrefixHashes, Journal, PromptLog | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorders:
    """Everything that requests are reported to."""

    metrics: RouterMetrics
    recent: RecentRecords
    store: RequestStore
    tracer: Tracer = NO_TRACER
    model_name: str = ""
    #: None: keys have no limits.
    limiter: Limiter | None = None
    #: None: usage is not kept.
    usage: UsageStore | None = None
    #: None: no stream can be resumed.
    logs: StreamLogs | None = None

    def open_journal(self, generation: Generation, accepted_at: float, trace: TraceContext | None) -> Journal:
        """The journal of a prompt that is accepted now, which is `accepted_at` in Unix time.

        `trace`: the span of the client's request.
        """
        record = Record.new(generation, accepted_at=accepted_at, clock=time.monotonic)
        request_trace = RequestTrace(tracer=self.tracer, parent=trace, model_name=self.model_name)
        return Journal(record, self.metrics, self.store, request_trace)

    def ended(self, client: Client, journals: Sequence[Journal], charged: Usage = _NO_USAGE) -> None:
        """Counts what a request of a tenant has used. `charged`: what another router has counted of it."""
        if not client.tenant or self.usage is None:
            return
        used = usage_of_all(journals) - charged
        self.metrics.tenants.add(client.tenant, used)
        self.usage.add(Account(tenant=client.tenant, key_id=client.id, model=self.model_name), used)


class Requests:
    """The client requests for one model that are open."""

    def __init__(
        self, cluster: Cluster, gate: Gate, recorders: Recorders, tokenizer: Tokenizer, *, by_priority: bool = False
    ) -> None:
        """`by_priority`: requests may have priorities."""
        self._by_priority = by_priority
        self._cluster = cluster
        self._gate = gate
        self._recorders = recorders
        self._tokenizer = tokenizer
        secret = cluster.seals.secret
        #: Requests under which workers have died.
        self.quarantine = Quarantine(b"" if secret is None else secret.mac(_REFUSED), cluster.policy.model_name)
        self._is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Refuses requests from now on."""
        self._is_draining = True

    @property
    def is_draining(self) -> bool:
        """Whether requests are refused because the router is shutting down."""
        return self._is_draining

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    @property
    def num_open(self) -> int:
        """Client requests whose responses are not complete."""
        return self._num_open

    @asynccontextmanager
    async def run(
        self,
        generations: Sequence[Generation],
        client: Client = ANONYMOUS,
        opened: OpenRequest | None = None,
        log: StreamLog | None = None,
    ) -> AsyncIterator[DeltaStream]:
        """Runs the prompts of one request of `client`. Leaving the block cancels those that still run.

        `opened`: its span, and what may end it early. `log`: where its output is kept, and what another router had.

        Raises:
            Overloaded, RateLimited, NoWorkers, Draining, Quarantined: the request was refused at once.
            RequestError: it has a priority, and this router does not take any.
            PdserveError: a later failure, raised by `DeltaStream.write_to`.
        """
        self._require_priority_allowed(generations, client)
        generations = [client.own(each) async for each in in_turns(generations)]
        journals = await self._open_journals(generations, None if opened is None else opened.trace)
        prompts = [PrefixHashes(each.prompt, each.cache_salt) async for each in in_turns(generations)]
        entrants = await self._entrants(generations, prompts)
        await self._refuse_quarantined(generations)
        self._refuse_if_unavailable()
        stream = self._stream(journals, opened)
        run = RunLog(log, journals, self._recorders.logs, stream)
        waves = Waves(self._gate, entrants, client, partial(self._recorders.metrics.rejected, "queue_full"))
        to_start = [*zip(generations, prompts, journals, run.prompt_logs, strict=True)]
        freed = freed_in_turns(generations, journals, prompts, entrants, to_start)
        async with freed, self._entered(generations, run, waves, client) as slots:
            async for journal in in_turns(journals):
                self._recorders.recent.add(journal.record)
            run.begin()
            try:
                async with service_group() as group:
                    waves.run(slots, self._starter(to_start, group, stream), group, stream)
                    yield stream
            finally:
                await self._end(client, journals, run, opened)

    def _starter(self, prompts: Sequence[_Prompt], group: ServiceGroup, stream: DeltaStream) -> Start:
        def start(index: int, slot: QueueSlot) -> asyncio.Task[None]:
            generation, hashes, journal, log = prompts[index]
            task = PromptTask(generation, hashes, journal, self._gate, slot, log)
            running = task.run(self._cluster, self._tokenizer, stream, self.quarantine)
            return group.start(running, name=generation.request_id)

        return start

    def _stream(self, journals: Sequence[Journal], opened: OpenRequest | None) -> DeltaStream:
        stream = DeltaStream(journals, self._recorders.metrics.wrote_first_token)
        if opened is not None:
            opened.doing = lambda: stream.describe() + self._cluster.without_decode
        return stream

    async def _end(self, client: Client, journals: Sequence[Journal], run: RunLog, opened: OpenRequest | None) -> None:
        for journal in journals:
            if not journal.record.state.is_final:
                journal.append(Ended.ended_early(None if opened is None else opened.ended_by()))
        try:
            await run.end()
        finally:
            if run.is_ours:
                self._recorders.ended(client, journals, run.charged.usage)

    async def _entrants(self, generations: Sequence[Generation], prompts: Sequence[PrefixHashes]) -> list[Entrant]:
        # Tokens are counted before anything is refused: later, measured demand shrinks when the cluster cannot meet it.
        uncached_tokens = [
            hashes.num_tokens if generation.needs_whole_prompt else await self._cluster.uncached_tokens(hashes)
            async for generation, hashes in in_turns(zip(generations, prompts, strict=True))
        ]
        self._recorders.metrics.received([hashes.num_tokens for hashes in prompts], uncached_tokens)
        return [
            Entrant(sequences=generation.sampling.n, uncached_tokens=uncached, priority=generation.priority)
            async for generation, uncached in in_turns(zip(generations, uncached_tokens, strict=True))
        ]

    @asynccontextmanager
    async def _entered(
        self,
        generations: Sequence[Generation],
        run: RunLog,
        waves: Waves,
        client: Client,
    ) -> AsyncIterator[list[QueueSlot]]:
        """The request in the queue, within its key's limits. Raises `RateLimited`, `Overloaded`.

        A stream of another router is taken when nothing refuses the request any more: until then it runs there.
        """
        with self._counted():
            if not run.is_resumed:
                async with self._within_limits(generations, client, run):
                    with waves.first() as slots:
                        yield slots
                return
            with waves.first() as slots:
                async with run.taken(), self._within_limits(generations, client, run):
                    yield slots

    @asynccontextmanager
    async def _within_limits(
        self, generations: Sequence[Generation], client: Client, run: RunLog
    ) -> AsyncIterator[None]:
        """Reserves what the request may use of its key's limits, and settles what it has used. Raises `RateLimited`."""
        limiter = self._recorders.limiter
        if limiter is None or client.limits is None:
            yield
            return
        prompt_tokens = sum(len(generation.prompt) for generation in generations)
        completion = sum(each.sampling.max_tokens * each.sampling.n for each in generations)
        try:
            if run.lease:
                reservation = await limiter.adopt(client, run.lease)
            else:
                reservation = await limiter.reserve(client, size(prompt_tokens, completion))
        except RateLimited:
            self._recorders.metrics.rejected("rate_limited")
            raise
        run.lease = "" if reservation is None else reservation.lease
        run.on_end = partial(limiter.ends, reservation)
        try:
            yield
        finally:
            if run.is_ours:
                limiter.settle(reservation, run.tokens_charged - run.charged.limit_tokens)
            else:
                limiter.hand_over(reservation)

    def _require_priority_allowed(self, generations: Sequence[Generation], client: Client) -> None:
        priority = next((generation.priority for generation in generations if generation.priority), 0)
        if priority not in (0, BATCH_PRIORITY) and not self._by_priority:
            raise RequestError(
                f"`priority` is {priority}, but this server admits requests in the order of their arrival. Leave it "
                "out, or start the router with --scheduling-policy priority.",
                param="priority",
            )
        if client.priority_ceiling is not None and priority < client.priority_ceiling:
            raise Forbidden(
                f"`priority` is {priority}, but requests with the API key {client.id} may have "
                f"{client.priority_ceiling} or more. Raise it.",
                param="priority",
            )

    async def _refuse_quarantined(self, generations: Sequence[Generation]) -> None:
        try:
            async for generation in in_turns(generations):
                self.quarantine.check(generation, time.monotonic())
        except Quarantined:
            self._recorders.metrics.rejected("quarantined")
            raise

    async def _open_journals(self, generations: Sequence[Generation], trace: TraceContext | None) -> list[Journal]:
        accepted_at = time.time()
        return [self._recorders.open_journal(each, accepted_at, trace) async for each in in_turns(generations)]

    def _refuse_if_unavailable(self) -> None:
        if self._is_draining:
            self._recorders.metrics.rejected("draining")
            raise Draining("The router is shutting down. Retry: another router will answer.")
        if not self._cluster.ready("decode") and not self._cluster.expects("decode"):
            self._recorders.metrics.rejected("no_decode_worker")
            raise NoWorkers(self._cluster.policy.no_decode_worker)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()
