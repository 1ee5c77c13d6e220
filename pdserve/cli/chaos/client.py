"""Clients as the contract wants them: a stream whose router is lost goes on at another one, others are sent again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from pdserve.base.errors import PdserveError
from pdserve.cli.chaos.answers import Answer, AnswerEvent, ErrorInStream, Events, read_event
from pdserve.cli.chaos.outcome import COMPLETE, LEFT, Outcome
from pdserve.cli.chaos.workload import Sending
from pdserve.cli.router_client import error_message

#: Small, so that a client that does not read is felt by the router.
_READ_BYTES = 2048
_CONNECT_TIMEOUT_S = 10.0
#: Between two tries, while no router is ready or none knows the stream.
_RETRY_S = 0.1
#: Answers to a stream that is to be resumed, after which the client tries again, as the documents of the API say.
_TEMPORARY = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
#: How long routers may not know a stream that a lost router had.
_RESUME_TIMEOUT_S = 30.0
#: The connection, or the router behind it, is lost.
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


class Refused(PdserveError):
    """A router has answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


@dataclass(slots=True, eq=False)
class Reader:
    """A running request, and what a fault does to its client."""

    outcome: Outcome
    task: asyncio.Task[object] | None
    #: Position in the stream, once it has answered; None: it cannot be resumed.
    last_event_id: str | None = None
    has_answered: bool = False
    #: When the router answered that runs its stream; None: it is not connected to one.
    attached_at: float | None = None
    resumes_until: float | None = None
    reads_again_at: float = 0.0
    has_left: bool = False

    def pause(self, duration_s: float) -> None:
        """It reads nothing for this time."""
        self.reads_again_at = time.monotonic() + duration_s

    def has_router(self, killed_at: Mapping[int, float]) -> bool:
        """Whether a router runs its stream, if it has one. `killed_at`: when each router was last killed, by index.

        A client that reads nothing does not notice that it has lost its router.
        """
        if not self.has_answered:
            return True
        router = self.outcome.routers[-1][1]
        return self.attached_at is not None and self.attached_at > killed_at.get(router, float("-inf"))

    def leave(self) -> None:
        """It disconnects."""
        self.has_left = True
        if self.task is not None:
            self.task.cancel()


class Clients:
    """All clients of a run."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        model: str,
        urls: Sequence[str],
        choose: Callable[[int], int | None],
        prefix: str,
        timeout_s: float,
    ) -> None:
        """`choose` gives the index of a ready router, if there is one. Request ids begin with `prefix`."""
        self._http = http
        self._model = model
        self._urls = urls
        self._choose = choose
        self._prefix = prefix
        self._timeout_s = timeout_s
        self.running: list[Reader] = []

    async def ask(self, sending: Sending) -> Outcome:
        """Sends a request and takes its answer to the end. A failure is recorded, not raised."""
        outcome = Outcome(sending=sending, request_id=f"{self._prefix}-{sending.number}", started_at=time.time())
        reader = Reader(outcome, None)
        self.running.append(reader)
        reader.task = asyncio.ensure_future(self._answered(reader))
        try:
            await reader.task
            outcome.status = COMPLETE
        except asyncio.CancelledError:
            if not reader.has_left:
                reader.task.cancel()
                raise
            outcome.status = LEFT
        except TimeoutError:
            outcome.error = f"not answered within {self._timeout_s:g} s"
        except (aiohttp.ClientError, PdserveError, ValueError, LookupError, TypeError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            self.running.remove(reader)
            outcome.ended_at = time.time()
        return outcome

    async def _answered(self, reader: Reader) -> None:
        async with asyncio.timeout(self._timeout_s):
            while True:
                await self._connect(reader)
                try:
                    return await (self._resume(reader) if reader.has_answered else self._send(reader))
                except _LOST:
                    reader.attached_at = None
                    # The supervisor learns of the end of a router at about the same time.
                    await asyncio.sleep(_RETRY_S)
                except Refused as error:
                    if self._must_send_again(reader, error):
                        reader.has_answered, reader.resumes_until = False, None
                    elif not self._may_wait_for_stream(reader, error):
                        raise
                    await asyncio.sleep(_RETRY_S)

    async def _connect(self, reader: Reader) -> None:
        """Turns to a router that is ready, as a load balancer does."""
        routers = reader.outcome.routers
        preferred = routers[-1][1] if routers else reader.outcome.sending.router
        while True:
            chosen = self._choose(preferred)
            if chosen is not None:
                routers.append((time.time(), chosen))
                return
            await asyncio.sleep(_RETRY_S)

    @staticmethod
    def _must_send_again(reader: Reader, error: Refused) -> bool:
        """Whether the router was lost before the stream could be resumed, as the missing id of its events says."""
        return reader.has_answered and reader.last_event_id is None and error.status == HTTPStatus.NOT_FOUND

    def _may_wait_for_stream(self, reader: Reader, error: Refused) -> bool:
        """Whether routers may still learn of the stream: a worker may not have reported it yet."""
        if not reader.has_answered or error.status not in _TEMPORARY:
            return False
        now = time.monotonic()
        if reader.resumes_until is None:
            reader.resumes_until = now + _RESUME_TIMEOUT_S
        return now < reader.resumes_until

    async def _send(self, reader: Reader) -> None:
        outcome = reader.outcome
        sending = outcome.sending
        outcome.num_repeated += len(outcome.routers) > 1
        outcome.answer = Answer()
        url = self._urls[outcome.routers[-1][1]] + sending.request.path
        body = json.dumps(sending.body(self._model)).encode()
        headers = {"X-Request-Id": outcome.request_id, "Content-Type": "application/json"}
        async with self._http.post(url, data=body, headers=headers) as response:
            await _require_ok(response)
            if sending.request.is_streamed:
                reader.has_answered, reader.attached_at = True, time.monotonic()
                await self._read_stream(reader, response)
            else:
                outcome.answer.add(await response.json())
                outcome.answer.is_complete = True
                outcome.token_times.append(time.time())

    async def _resume(self, reader: Reader) -> None:
        outcome = reader.outcome
        url = f"{self._urls[outcome.routers[-1][1]]}/v1/requests/{outcome.request_id}/stream"
        headers = {} if reader.last_event_id is None else {"Last-Event-ID": reader.last_event_id}
        if not headers:  # All events come again.
            outcome.answer = Answer()
        async with self._http.get(url, headers=headers) as response:
            await _require_ok(response)
            outcome.num_resumed += 1
            reader.resumes_until, reader.attached_at = None, time.monotonic()
            await self._read_stream(reader, response)

    async def _read_stream(self, reader: Reader, response: aiohttp.ClientResponse) -> None:
        events = Events()
        async for data in response.content.iter_any():
            for event in events.feed(data):
                _take(reader, event)
            if (wait_s := reader.reads_again_at - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
        if not reader.outcome.answer.is_complete:
            raise ErrorInStream("the stream ended before the answer did")


def _take(reader: Reader, event: AnswerEvent) -> None:
    answer = reader.outcome.answer
    content = read_event(event)
    if content is None:
        answer.is_complete = True
    elif answer.add(content):
        reader.outcome.token_times.append(time.time())
    reader.last_event_id = event.id or reader.last_event_id


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    """Raises `Refused` unless the router has taken the request."""
    if response.status != HTTPStatus.OK:
        raise Refused(response.status, error_message(await response.read()) or str(response.reason))


def open_http() -> aiohttp.ClientSession:
    """A session with a connection of its own for each request."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=_READ_BYTES)
