"""Runs what the API layers ask for: admission, one saga for each prompt, and the books about how it went."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from pdserve.base.errors import Draining, NoWorkers, Overloaded, PdserveError
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger, request_id_var
from pdserve.base.tasks import service_group
from pdserve.model.tokenizer import Tokenizer
from router_svc.generation import Generation
from router_svc.records.record import Json, Phase, Record, Ring
from router_svc.records.request_state import RequestState
from router_svc.records.request_store import RequestStore, StoredRequest
from router_svc.request.admission import Place
from router_svc.request.gate import Gate
from router_svc.request.output import ChoiceDelta, Output
from router_svc.request.saga import Saga
from router_svc.request.stream import Stream
from router_svc.routing.cluster import Cluster

log = get_logger(__name__)

#: Ids of responses: of chat completions, of completions, of gRPC.
ID_PREFIXES = ("chatcmpl-", "cmpl-", "gen-")


class Requests:
    """All requests of this router."""

    def __init__(self, cluster: Cluster, gate: Gate, ring: Ring, store: RequestStore, tokenizer: Tokenizer) -> None:
        self._cluster = cluster
        self._metrics = cluster.metrics
        self._gate = gate
        self._ring = ring
        self._store = store
        self._tokenizer = tokenizer
        self._draining = False
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """From now on requests are refused."""
        self._draining = True

    @property
    def is_draining(self) -> bool:
        """Whether requests are refused because the router is shutting down."""
        return self._draining

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    @property
    def num_open(self) -> int:
        """Client requests that have not been answered to the end."""
        return self._open

    @asynccontextmanager
    async def run(self, generations: Sequence[Generation]) -> AsyncIterator[Stream]:
        """Runs the prompts of one client request; leaving the block ends what still runs.

        Raises:
            Overloaded, NoWorkers, Draining: the request was refused at once.
            PdserveError: what went wrong later, out of `Stream.into`.
        """
        self._refuse_if_unavailable()
        accepted_at = time.time()
        records = [
            Record.of(generation, accepted_at=accepted_at, clock=time.monotonic, on_move=self._moved)
            for generation in generations
        ]
        stream = Stream(records, self._metrics.time_to_first_token.observe)
        with self._counted(), self._places(generations) as places:
            for record in records:
                self._ring.add(record)
            try:
                async with service_group() as group:
                    for generation, record, place in zip(generations, records, places, strict=True):
                        group.start(self._run_one(generation, record, place, stream), name=generation.request_id)
                    yield stream
            finally:
                for record in records:
                    if not record.state.is_final:
                        self._end(record, RequestState.CANCELLED, "cancelled")

    async def trace(self, request_id: str) -> dict[str, Json] | None:
        """A request's decision record, from memory or Redis; None when neither has it. Raises `StoreError`.

        The id may be the response's, or the X-Request-Id that the client sent.
        """
        ids = [RequestId(prefix + request_id) for prefix in ("", *ID_PREFIXES)]
        for known in ids:
            record = self._ring.get(known)
            if record is not None:
                return record.as_json()
        for known in ids:
            stored = await self._store.get(known)
            if stored is not None:
                return _stored_as_json(stored)
        return None

    async def _run_one(self, generation: Generation, record: Record, place: Place, stream: Stream) -> None:
        """One prompt, from the queue to its last token. Its failure travels in the stream, behind its tokens."""
        request_id_var.set(generation.request_id)
        error: PdserveError | None = None
        try:
            await self._gate.admitted(place)
            record.mark(Phase.ADMITTED)
            output = Output(generation, self._tokenizer)
            await Saga(generation, self._cluster, record, output, _emitter(generation, stream)).run()
            record.finish_reasons = output.finish_reasons
            self._end(record, RequestState.FINISHED, ",".join(output.finish_reasons))
        except PdserveError as known:
            error = known
        except Exception as unexpected:  # noqa: BLE001 - the border of a request: one that breaks harms no other
            log.error("request_broke", exc=unexpected)
            error = PdserveError("The request failed unexpectedly; the router's log has the traceback.")
        finally:
            self._gate.leave(place)
        if error is not None:
            if isinstance(error, Overloaded):
                self._metrics.rejected("queue_timeout")
            record.error = str(error)
            self._end(record, RequestState.FAILED, type(error).__name__)
        await stream.end(error)

    def _refuse_if_unavailable(self) -> None:
        if self._draining:
            self._metrics.rejected("draining")
            raise Draining("The router is shutting down. Try again: another one will answer.")
        if not self._cluster.ready("decode"):
            self._metrics.rejected("no_decode_worker")
            raise NoWorkers("No decode worker is ready. Try again in a few seconds.")

    @contextmanager
    def _places(self, generations: Sequence[Generation]) -> Iterator[list[Place]]:
        try:
            places = self._gate.enter([generation.sampling.n for generation in generations])
        except Overloaded:
            self._metrics.rejected("queue_full")
            raise
        try:
            yield places
        finally:
            for place in places:
                self._gate.leave(place)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _moved(self, record: Record) -> None:
        self._store.put(record.progress)

    def _end(self, record: Record, state: RequestState, outcome: str) -> None:
        record.mark(Phase.FINISH)
        record.move(state, outcome=outcome)
        self._store.put(record.progress, json.dumps(record.as_json()))
        self._metrics.ended(record)
        log.info("request_ended", **record.summary())


def _emitter(generation: Generation, stream: Stream) -> Callable[[list[ChoiceDelta]], Awaitable[None]]:
    """Numbers the choices of one prompt as the whole response does."""
    if not generation.first_choice:
        return stream.put

    async def put(deltas: list[ChoiceDelta]) -> None:
        await stream.put(
            [replace(delta, choice_index=generation.first_choice + delta.choice_index) for delta in deltas]
        )

    return put


def _stored_as_json(stored: StoredRequest) -> dict[str, Json]:
    if stored.record:
        record: dict[str, Json] = json.loads(stored.record)
        return record
    # It never ended: its router was lost. What is known is how far it came.
    progress = stored.progress
    return {
        "request_id": progress.request_id,
        "accepted_at": progress.history[0].at,
        "state": progress.state.value,
        "attempt": progress.attempt,
        "story": progress.story(),
        "prefill_worker": progress.prefill_worker,
        "decode_worker": progress.decode_worker,
    }
