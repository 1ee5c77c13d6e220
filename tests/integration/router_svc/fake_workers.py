"""Workers that speak the real protocol and compute nothing. Their replies and faults come from a script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from pdserve.base.errors import PdserveError
from pdserve.base.ids import Epoch, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SAMPLING_VERSION
from pdserve.base.tasks import service_group
from pdserve.base.wire import error_to_wire, tokens_to_wire
from pdserve.net.admin import bound_socket
from pdserve.net.rpc import method, serve_grpc, trace_of
from pdserve.net.stream_server import serve_streams
from pdserve.net.streams import MessageStream, PeerLeft
from pdserve.peers.registry import Registrar
from pdserve.peers.workers import Tier, WorkerLoad, WorkerRecord
from pdserve.redis.store import Store
from pdserve.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from tests.integration.router_svc.script import CallLog, Context, Left, Vanished
from tests.support.deadline import DEADLINE_S
from tests.support.records import LAYOUT
from tests.support.tiny_model import MAX_POSITIONS, NAME

#: Steps that a decode worker sends without a pause.
STEPS_AT_ONCE = 16


class FakeDecode:
    """A decode worker. It has the prompt's first `cached` tokens in its cache."""

    def __init__(self, calls: CallLog) -> None:
        self._calls = calls
        self.cached = 0

    async def serve(self, stream: MessageStream[decode_pb2.DecodeRequest]) -> None:
        """Serves one connection."""
        with contextlib.suppress(Left, Vanished):
            async with self._calls.open("decode"):
                first = await stream.read()
                if first is None:  # The router had to leave before it said anything.
                    return
                self._calls.note_start(first.start)
                await _DecodeSession(self, self._calls, first.start, stream).run()


class _DecodeSession:
    def __init__(
        self,
        worker: FakeDecode,
        calls: CallLog,
        start: decode_pb2.DecodeStart,
        stream: MessageStream[decode_pb2.DecodeRequest],
    ) -> None:
        self._worker = worker
        self._calls = calls
        self._start = start
        self._stream = stream
        self._attempt = start.ref.attempt
        self._stopped = {each.choice_index for each in start.output if each.is_over}
        #: Tokens that the client has of each choice, as far as this worker knows.
        self._known = {each.choice_index: len(each.token_ids) for each in start.output}
        self._ready = asyncio.Event()
        self._local: decode_pb2.PrefillLocally | None = None

    async def run(self) -> None:
        script = self._calls.script
        uncached = len(self._start.prompt_token_ids) - self._worker.cached
        async with service_group() as tasks:
            commands = tasks.start(self._follow_commands(tasks), name="commands")
            # The task must start before a fault can cancel it.
            await asyncio.sleep(0)
            await script.reach("decode", self._stream)
            if self._start.is_moving:
                tasks.start(self._grant(), name="grant")
            elif uncached <= self._start.local_prefill_threshold or uncached > self._calls.max_receivable_tokens:
                self._local = decode_pb2.PrefillLocally()
            else:
                tasks.start(self._grant(), name="grant")
            if self._local is None:
                await self._ready.wait()
            await script.reach("decode_started", self._stream)
            started = decode_pb2.DecodeStarted(
                prefilled_locally=self._local is not None,
                cached_tokens=self._worker.cached,
                queue_s=0.25,
                # Longer than any request here takes: all of the wait was the step.
                computing_s=60.0,
            )
            await self._stream.write(decode_pb2.DecodeResponse(started=started))
            await self._send_tokens()
            if script.says_end:
                await self._stream.write(decode_pb2.DecodeResponse(ended=decode_pb2.DecodeEnded()))
            self._calls.note_decoded()
            if script.says_end:
                return
            # As with real workers, the router ends the stream.
            await asyncio.wait((commands,), timeout=DEADLINE_S)

    async def _send_tokens(self) -> None:
        script, sampling = self._calls.script, self._start.sampling
        first = 0 if self._local is not None else 1
        queues = [
            deque(script.messages(choice, self._known.get(choice, first), sampling)) for choice in range(sampling.n)
        ]
        steps = itertools.count(1)
        while any(queues):
            if script.pace is not None:
                await script.pace.acquire()
            await script.reach("decode_moved_token" if self._start.is_moving else "decode_token", self._stream)
            for choice, queue in enumerate(queues):
                while queue and queue[0].first_index < self._known.get(choice, 0):
                    queue.popleft()
            messages = [queue.popleft() for index, queue in enumerate(queues) if queue and index not in self._stopped]
            if not messages:
                return
            tokens = decode_pb2.DecodeTokens(choices=[tokens_to_wire(message) for message in messages])
            await self._stream.write(decode_pb2.DecodeResponse(tokens=tokens))
            if next(steps) % STEPS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _grant(self) -> None:
        await self._calls.script.reach("decode_ticket", self._stream)
        moving = "/moving" if self._start.is_moving else ""
        transfer_id = f"{self._start.ref.request_id}/{self._attempt}{moving}".encode()
        self._calls.commits[transfer_id] = self._ready
        ticket = decode_pb2.Ticket(
            transfer_id=transfer_id,
            attempt=self._attempt,
            lease_s=self._calls.script.lease_s,
            data_address=b"" if self._start.senders_ask else b"an address",
        )
        granted = decode_pb2.TicketGranted(ticket=ticket, reserve_s=0.125)
        await self._stream.write(decode_pb2.DecodeResponse(ticket=granted))

    async def _hand_off(self, hand_off: decode_pb2.HandOff) -> None:
        handed_off = decode_pb2.HandedOff(sent_blocks=3)
        try:
            await self._calls.script.reach("decode_hand_off", self._stream)
            self._calls.commits[hand_off.ticket.transfer_id].set()
        except PdserveError as error:
            handed_off = decode_pb2.HandedOff(error=error_to_wire(error))
        handed_off.number = hand_off.number
        await self._stream.write(decode_pb2.DecodeResponse(handed_off=handed_off))

    async def _follow_commands(self, tasks: Any) -> None:
        while (request := await self._stream.read()) is not None:
            kind = str(request.WhichOneof("command"))
            if kind == "renew_ticket" and not self._ready.is_set():
                self._attempt = request.renew_ticket.attempt
                tasks.start(self._grant(), name="grant")
            elif kind == "prefill_locally":
                await self._calls.script.reach("decode_local", self._stream)
                self._local = request.prefill_locally
                self._ready.set()
            elif kind == "catch_up":
                for each in request.catch_up.choices:
                    self._known[each.choice_index] = each.first_index + len(each.token_ids)
            elif kind == "hand_off":
                tasks.start(self._hand_off(request.hand_off), name="hand-off")
            elif kind == "replicate_to":
                self._calls.replicas.append(request.replicate_to)
            elif kind == "stop_choice":
                self._stopped.add(request.stop_choice.choice_index)
            self._calls.note_command(kind)
        raise PeerLeft


def _failure(error: PdserveError) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(failed=error_to_wire(error))


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill worker."""

    def __init__(self, calls: CallLog) -> None:
        self._calls = calls

    @method
    async def Prefill(  # noqa: N802 - the name is the protocol's
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> None:
        self._calls.note_prefill(request, trace_of(context))
        try:
            async with self._calls.open("prefill"):
                await self._run(request, context)
            if request.retains_prompt and request.HasField("ticket"):
                await self._calls.retained()
        except Vanished:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def _run(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        script = self._calls.script
        await script.reach("prefill", context)
        if request.scores_prompt:
            await self._score(request, context)
            return
        if request.HasField("pooling"):
            await self._pool(request, context)
            return
        prompt_tokens = len(request.prompt_token_ids)
        for point, queued, computed in (("queued", True, 0), ("started", False, 0), ("", False, prompt_tokens)):
            progress = prefill_pb2.PrefillProgress(
                queued=queued, computed_tokens=computed, cached_tokens=script.cached_tokens
            )
            await context.write(prefill_pb2.PrefillResponse(progress=progress))
            await script.reach(f"prefill_{point}", context)
        await script.reach("prefill_token", context)
        first = prefill_pb2.PrefillFirstToken(choices=self._first(request), cached_tokens=script.cached_tokens)
        await context.write(prefill_pb2.PrefillResponse(first_token=first))
        await script.reach("prefill_commit", context)
        if request.HasField("ticket"):
            self._calls.commits[request.ticket.transfer_id].set()
            await script.reach("prefill_committed", context)
        done = prefill_pb2.PrefillDone(
            queue_s=0.5, compute_s=1.5, exposed_s=0.25, sent_bytes=4096, sent_blocks=2, chunks=1
        )
        await context.write(prefill_pb2.PrefillResponse(done=done))

    async def _score(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        """Scores three tokens at a time: each token as its id below 0."""
        assert not request.HasField("ticket")
        tokens = list(request.prompt_token_ids)
        for start in range(0, len(tokens), 3):
            stop = min(start + 3, len(tokens))
            entries = [self._calls.script.score(token, request.sampling) for token in tokens[start + 1 : stop + 1]]
            scores = prefill_pb2.PromptLogprobs(first_index=start + 1, logprobs=entries)
            if entries:
                await context.write(prefill_pb2.PrefillResponse(prompt_logprobs=scores))
            progress = prefill_pb2.PrefillProgress(computed_tokens=stop)
            await context.write(prefill_pb2.PrefillResponse(progress=progress))
            await self._calls.script.reach("prefill_scored", context)
        await context.write(prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(chunks=1)))

    async def _pool(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        """The embedding has the prompt's ids, its kind of pooling, and zeros."""
        assert not request.HasField("ticket")
        script, tokens = self._calls.script, list(request.prompt_token_ids)
        progress = prefill_pb2.PrefillProgress(computed_tokens=len(tokens), cached_tokens=script.cached_tokens)
        await context.write(prefill_pb2.PrefillResponse(progress=progress))
        await script.reach("prefill_pooled", context)
        numbers = script.embedding(tokens, request.pooling)
        values = prefill_pb2.PromptEmbedding(values=struct.pack(f"<{len(numbers)}f", *numbers))
        await context.write(prefill_pb2.PrefillResponse(embedding=values))
        await context.write(prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(chunks=1)))

    def _first(self, request: prefill_pb2.PrefillRequest) -> list[Any]:
        firsts = []
        for choice in range(request.sampling.n):
            message = self._calls.script.messages(choice, 0, request.sampling)[0]
            is_all = len(message.token_ids) == 1 and message.finish_reason is not None
            firsts.append(
                tokens_to_wire(
                    replace(
                        message,
                        token_ids=message.token_ids[:1],
                        logprobs=() if request.forced_first_tokens else message.logprobs[:1],
                        finish_reason=message.finish_reason if is_all else None,
                        stop_token_id=message.stop_token_id if is_all else None,
                    )
                )
            )
        return firsts


@dataclass
class FakeWorker:
    """A running fake worker and its record in the registry."""

    record: WorkerRecord
    registrar: Registrar

    def set(
        self,
        *,
        load: WorkerLoad | None = None,
        ready: bool | None = None,
        layout: KvLayout | None = None,
        reads_grammars: bool | None = None,
        asks_for_addresses: bool | None = None,
        sampling_version: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Changes the worker's report, and sends it at once."""
        given = {"load": load, "ready": ready, "layout": layout, "reads_grammars": reads_grammars}
        given |= {"asks_for_addresses": asks_for_addresses}
        given |= {"sampling_version": sampling_version, "max_model_len": max_model_len}
        self.record = replace(self.record, **{name: value for name, value in given.items() if value is not None})
        self.registrar.announce()


@asynccontextmanager
async def fake_worker(
    calls: CallLog, tier: Tier, worker_id: str, redis_url: str, model: str = NAME
) -> AsyncIterator[FakeWorker]:
    """A worker that serves and is registered until the block ends."""

    def register(server: grpc.aio.Server) -> None:
        if tier == "prefill":
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(FakePrefill(calls), server)

    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store(redis_url))
        group = await stack.enter_async_context(service_group())
        address, _ = await stack.enter_async_context(
            serve_grpc(register, [], host="127.0.0.1", port=0, flag="--grpc-port", grace_s=0)
        )
        stream_address = ""
        if tier == "decode":
            listener = bound_socket("127.0.0.1", 0, flag="--stream-port")
            stream_address = await stack.enter_async_context(
                serve_streams(listener, decode_pb2.DecodeRequest.FromString, FakeDecode(calls).serve, _failure)
            )
        record = WorkerRecord(
            worker_id=WorkerId(worker_id),
            epoch=Epoch(new_epoch()),
            tier=tier,
            grpc_address=address,
            http_address="127.0.0.1:1",
            stream_address=stream_address,
            model=model,
            layout=LAYOUT if model == NAME else replace(LAYOUT, model=f"fingerprint of {model}"),
            max_num_seqs=8,
            max_model_len=MAX_POSITIONS,
            total_blocks=100,
            pid=1,
            ready=True,
            reads_grammars=True,
            asks_for_addresses=True,
            sampling_version=SAMPLING_VERSION,
            load=WorkerLoad(free_blocks=100),
        )
        worker = FakeWorker(record, None)  # type: ignore[arg-type] # the registrar needs the worker first
        worker.registrar = Registrar(store, lambda: worker.record, heartbeat_s=0.1)
        group.start(worker.registrar.run(), name="registrar")
        yield worker
