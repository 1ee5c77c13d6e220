"""What fake workers reply, how they fail, and what they were sent."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdserve.base.errors import PdserveError
from pdserve.base.sampling import ChoiceTokens, FinishReason, TokenLogprobs
from pdserve.base.trace_context import TraceContext
from pdserve.net.streams import MessageStream
from pdserve.peers.workers import Tier
from pdserve.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.support.deadline import DEADLINE_S
from tests.support.tiny_model import END, tokens_of
from tests.support.virtual_time import advance

Context = grpc.aio.ServicerContext[Any, Any] | MessageStream[decode_pb2.DecodeRequest]
#: A fault runs at its point in a call. It may raise or wait.
Fault = Callable[[Context], Awaitable[None]]


class Vanished(Exception):
    """Ends a call like a broken connection."""


async def vanish(_: Context) -> None:
    """The worker dies: its peer sees a broken connection."""
    raise Vanished


class Left(Exception):
    """Ends a call as if it were complete."""


async def leave(_: Context) -> None:
    """The worker closes the stream without an error."""
    raise Left


async def hang(_: Context) -> None:
    """The worker is alive and silent."""
    # A timer, not an event: an event without a reference is garbage-collected together with its waiter.
    await asyncio.sleep(3600)


def silent_for(seconds: float) -> Fault:
    """The worker is alive and silent while so much time passes. Needs a test marked `advanced_time`."""

    async def be_silent(context: Context) -> None:
        advance(seconds)
        await hang(context)

    return be_silent


def failing(error: PdserveError) -> Fault:
    """The worker answers with an error."""

    async def fail(_: Context) -> None:
        raise error

    return fail


@dataclass
class Script:
    """Replies of the model and faults of the workers. Each call uses up one fault; None is a call without one."""

    #: Tokens of each choice, by index. The last reply serves further choices.
    replies: list[list[int]] = field(default_factory=lambda: [[*tokens_of("Hello world."), END]])
    tokens_per_message: int = 1
    #: Log-probabilities of tokens that requests list, by token.
    listed: dict[int, float] = field(default_factory=dict)
    cached_tokens: int = 0
    faults: dict[str, deque[Fault | None]] = field(default_factory=lambda: defaultdict(deque))
    #: Decode workers say that they have sent everything, and close the stream at once.
    says_end: bool = False
    #: Lease of tickets: long, unless a test is about a prefill worker that is silent for it.
    lease_s: float = DEADLINE_S
    #: If set, decode workers send each message after the first token only when it is released.
    pace: asyncio.Semaphore | None = None

    def fail(self, point: str, *faults: Fault | None) -> None:
        """Adds faults at a point of the calls.

        Points are prefill, prefill_queued, prefill_started, prefill_token, prefill_commit, prefill_committed and
        prefill_scored, and
        decode, decode_ticket, decode_local, decode_started, decode_token and decode_hand_off; decode_moved_token for a
        request that has moved.
        """
        self.faults[point].extend(faults)

    async def reach(self, point: str, context: Context) -> None:
        """A call reaches a point, where its fault runs."""
        fault = self.faults[point].popleft() if self.faults[point] else None
        if fault is not None:
            await fault(context)

    def score(self, token_id: int, sampling: Any) -> common_pb2.TokenLogprobs:
        """The score of a prompt token, with as many alternatives as are requested: the ids from 65 on."""
        top = [65 + index for index in range(sampling.logprobs)] + list(sampling.logprob_token_ids)
        logprobs = [-0.25 * (index + 1) for index in range(len(top))]
        return common_pb2.TokenLogprobs(logprob=-float(token_id), rank=7, top_ids=top, top_logprobs=logprobs)

    def embedding(self, tokens: list[int], pooling: Any) -> list[float]:
        """How often a token occurs, by the rest of its id: of the last token, of the first one or of all."""
        kept = {prefill_pb2.POOLING_KIND_LAST: tokens[-1:], prefill_pb2.POOLING_KIND_CLS: tokens[:1]}.get(
            pooling.kind, tokens
        )
        numbers = [0.0] * pooling.dimensions
        for token in kept:
            numbers[token % pooling.dimensions] += 1.0
        length = math.hypot(*numbers) if pooling.normalizes else 1.0
        return [number / length for number in numbers]

    def messages(self, choice: int, start: int, sampling: Any) -> list[ChoiceTokens]:
        """The reply of a choice from token `start` on."""
        reply = self.replies[min(choice, len(self.replies) - 1)][: sampling.max_tokens]
        ends = FinishReason.STOP if reply[-1] == END and not sampling.ignore_eos else FinishReason.LENGTH
        messages = []
        for first in range(start, len(reply), self.tokens_per_message):
            token_ids = tuple(reply[first : first + self.tokens_per_message])
            last = first + len(token_ids) == len(reply)
            messages.append(
                ChoiceTokens(
                    choice_index=choice,
                    first_index=first,
                    token_ids=token_ids,
                    logprobs=tuple(self._logprobs(token_id, sampling.logprob_token_ids) for token_id in token_ids)
                    if sampling.HasField("logprobs")
                    else (),
                    finish_reason=ends if last else None,
                    stop_token_id=END if last and ends is FinishReason.STOP else None,
                )
            )
        return messages

    def _logprobs(self, token_id: int, listed: Sequence[int]) -> TokenLogprobs:
        """Two alternatives, and the tokens that the request lists, with the log-probabilities of `listed`."""
        found = {token_id: -0.5, 255: float("-inf")}
        found |= {each: self.listed.get(each, -9.0) for each in listed if each not in found or each in self.listed}
        return TokenLogprobs(logprob=-0.5, rank=1, top_ids=tuple(found), top_logprobs=tuple(found.values()))


class CallLog:
    """All calls to the fake workers. It also links a prefill worker's commit to the decode worker's ticket."""

    def __init__(self, script: Script) -> None:
        self.script = script
        #: Set by a commit, by transfer id.
        self.commits: dict[bytes, asyncio.Event] = {}
        #: Decode workers prefill longer prompts themselves: they cannot receive their blocks.
        self.max_receivable_tokens = 1_000_000
        #: Requests and commands from routers, in order.
        self.decode_starts: list[decode_pb2.DecodeStart] = []
        self.commands: list[str] = []
        #: Where decode workers should copy blocks.
        self.replicas: list[decode_pb2.ReplicateTo] = []
        self.prefills: list[prefill_pb2.PrefillRequest] = []
        #: The trace contexts that came with them.
        self.prefill_traces: list[TraceContext | None] = []
        #: Calls in progress. Must be zero after every test.
        self.num_open = 0
        #: Those to prefill workers that routers keep open behind the handover.
        self.num_retained = 0
        #: Requests for which a decode worker has sent every token.
        self.num_decoded = 0
        self._ends: dict[Tier, set[asyncio.Timeout]] = {"prefill": set(), "decode": set()}
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def open(self, tier: Tier) -> AsyncIterator[None]:
        """A call to a worker of this tier is in progress in the block. Raises `Vanished` if `cut` ends it."""
        self._note_open(1)
        try:
            async with asyncio.timeout(None) as end:
                self._ends[tier].add(end)
                yield
        except TimeoutError:
            if end.expired():
                raise Vanished from None
            raise
        finally:
            self._ends[tier].discard(end)
            self._note_open(-1)

    async def retained(self) -> None:
        """Waits for the router to end a call in which nothing is left to do."""
        try:
            self.num_retained += 1
            self._note()
            await asyncio.Event().wait()
        finally:
            self.num_retained -= 1
            self._note()

    def cut(self, tier: Tier) -> int:
        """Breaks the connections of all calls in progress to workers of this tier, and returns how many there were."""
        for end in self._ends[tier]:
            end.reschedule(asyncio.get_running_loop().time())
        return len(self._ends[tier])

    def _note_open(self, change: int) -> None:
        self.num_open += change
        self._note()

    def note_decoded(self) -> None:
        """A decode worker has sent every token."""
        self.num_decoded += 1
        self._note()

    def note_start(self, start: decode_pb2.DecodeStart) -> None:
        """A decode worker has received a request."""
        self.decode_starts.append(start)
        self._note()

    def note_prefill(self, request: prefill_pb2.PrefillRequest, trace: TraceContext | None) -> None:
        """A prefill worker has received a request."""
        self.prefills.append(request)
        self.prefill_traces.append(trace)
        self._note()

    def note_command(self, kind: str) -> None:
        """A decode worker has received a command."""
        self.commands.append(kind)
        self._note()

    def forget(self) -> None:
        """Drops what it has noted: a fuzzer makes calls without end."""
        for noted in (self.decode_starts, self.commands, self.replicas, self.prefills, self.prefill_traces):
            noted.clear()
        self.commits.clear()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds. Checks it at every change of the log."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self._changed.wait()
