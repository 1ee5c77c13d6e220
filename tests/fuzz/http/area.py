"""A router with scripted workers, called over HTTP by whom it does not know.

No answer may be an internal error, and each has to be as the OpenAPI document says. What the document allows is not
refused as invalid, and what it forbids is not served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from random import Random
from zlib import crc32

import psutil

from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.reference.document import make_document
from router_svc.api.reference.operations import OPERATIONS
from tests.fuzz.area import Area, Feeder
from tests.fuzz.http.answers import Answer, answers_of
from tests.fuzz.http.bodies import BodyMaker
from tests.fuzz.http.wire import connection, get_request, json_request
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.support.described import Description
from tests.support.redis import eventually
from tests.support.tiny_model import NAME, write_model

#: Silence of the router after which a client has heard everything, for requests that may never be complete.
_SILENCE_S = 0.05
#: Time from the end of what a client sends until it leaves.
_LEAVE_S = 0.5
#: Requests whose line says which operation they are for, however the server reads paths.
_PLAIN = re.compile(rb"(GET|POST|HEAD) (/[A-Za-z0-9/_.-]*)(?:\?\S*)? HTTP/1\.1\r\n")
#: In these two points the router takes more than the document allows.
_LAXER = re.compile(r"does not match '\^\[A-Za-z_\]|is (greater|less) than the (maximum|minimum)")
#: Bytes of an answer after which a client leaves, at most.
_LONGEST_READ = 3000
_REFUSED = range(400, 500)
#: A flag's limit, which is not in the document.
_LIMIT = b"--max-request-timeout-s"
#: Prompts beyond the context, which depends on the model: templates and tools add to what the body has.
_CONTEXT = b"tokens, but the context holds"
_INVALID = (400, 415, 422)


@cache
def _description() -> Description:
    return Description(make_document(OPERATIONS))


@cache
def _maker() -> BodyMaker:
    return BodyMaker(_description())


class Errors(logging.Handler):
    """The errors that are logged: no client can make a router log any."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it."""
        self.records.append(record)

    def raise_any(self) -> None:
        """Raises the first one's exception, or an `AssertionError`."""
        for record in self.records:
            cause = record.exc_info[1] if record.exc_info else None
            raise AssertionError(f"an error was logged: {record.getMessage()}") from cause


class HttpFeeder:
    """Connections to the HTTP port."""

    def __init__(self, cluster: ScriptedCluster, errors: Errors) -> None:
        self._cluster = cluster
        self._errors = errors
        self._process = psutil.Process()
        self._fds: int | None = None

    async def feed(self, target: str, data: bytes) -> str:
        """One connection; returns the statuses of its answers."""
        if target == "leave":
            return await self._leave(data)
        waits = target == "connection"
        received = await self._exchange(data, is_endless=waits or b" /console/events" in data[:200])
        self._errors.raise_any()
        # In a thread: what is measured is the event loop of the router.
        return await asyncio.to_thread(self._judge, target, data, received)

    def _judge(self, target: str, data: bytes, received: bytes) -> str:
        answers = answers_of(received, data)
        for answer in answers:
            _check_any(answer)
        plain = _PLAIN.match(data)
        if answers and plain and b".." not in plain[2] and b"//" not in plain[2]:
            _check_described(plain[1].decode(), plain[2].decode(), answers[0])
        if target != "connection":
            assert len(answers) == 1, f"{len(answers)} answers"
            _check_agreement(target, data, answers[0])
        return f"{target} {answers[0].status if answers else 'closed'}"

    async def check(self) -> None:
        """The same answer as ever, nothing that is held, open or admitted, and no connection left."""
        cluster = self._cluster
        status, answer = await cluster.complete()
        assert (status, answer["choices"][0]["text"]) == (200, "Hello world."), answer
        await cluster.calls.until(lambda: cluster.calls.num_open == 0)
        cluster.calls.forget()
        await eventually(self._is_idle)
        assert cluster.router.health.is_ready

    async def _is_idle(self) -> bool:
        router = self._cluster.router
        gate = router.models.first.gate
        assert router._console is not None
        if self._fds is None:
            self._fds = self._process.num_fds()
        held = (router.num_open, router._intake.held_bytes, gate.num_admitted, gate.num_waiting)
        return held == (0, 0, 0, 0) and not router._console.feed.num_readers and self._process.num_fds() <= self._fds

    async def _exchange(self, data: bytes, *, is_endless: bool) -> bytes:
        host, port = self._cluster.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        received = bytearray()
        try:
            for piece in _pieces(data):
                writer.write(piece)
                await asyncio.sleep(0)
            while True:
                async with asyncio.timeout(_SILENCE_S if is_endless else None):
                    piece = await reader.read(65_536)
                received += piece
                if not piece:
                    break
        except TimeoutError:
            # Half-closed: the router is not to wait for the rest of a request. It may not notice while it holds back a
            # body that nothing reads; then the client leaves, which it has to notice.
            with contextlib.suppress(TimeoutError, OSError):
                writer.write_eof()
                async with asyncio.timeout(_LEAVE_S):
                    received += await reader.read()
            writer.transport.abort()
        except ConnectionError:
            pass
        finally:
            writer.close()
        return bytes(received)

    async def _leave(self, data: bytes) -> str:
        """Leaves in the middle of an answer, at some byte of it."""
        host, port = self._cluster.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(crc32(data) % _LONGEST_READ)
        writer.transport.abort()
        return "left"


def _pieces(data: bytes) -> list[bytes]:
    """The bytes at once, or in pieces, which is as reproducible as they are."""
    size = (max(1, len(data)), 1000, 7)[crc32(data) % 3]
    return [data[start : start + size] for start in range(0, min(len(data), 20 * size), size)] + [data[20 * size :]]


def _check_any(answer: Answer) -> None:
    """Raises `AssertionError` for an internal error, or for one without a proper body."""
    shown = f"{answer.status} {answer.content[:300]!r}"
    assert answer.status < 500 or _is_late(answer), shown
    if answer.status < 400 or answer.is_head:
        return
    if answer.headers["Content-Type"].startswith("application/json"):
        forms = [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "MessagesError", "OllamaError")]
        _description().check_value({"anyOf": forms}, json.loads(answer.content), shown)
    else:
        assert answer.status in (400, 417), shown
        assert answer.headers["Content-Type"].startswith("text/plain"), shown
        assert b"Traceback" not in answer.content, shown


def _is_late(answer: Answer) -> bool:
    """Whether the request's own `timeout` was over."""
    names = (b"deadline_exceeded", b"which is its timeout")
    return answer.status == 504 and any(name in answer.content for name in names)


def _check_described(method: str, path: str, answer: Answer) -> None:
    known = _description().find(method, path)
    if known is None:
        # Broken headers are noticed before the path is looked up.
        assert answer.status in (400, 403, 404, 405, 413, 417), f"{method} {path} does not exist: {answer.status}"
    elif not answer.is_head and answer.headers.get("Content-Type", "").partition(";")[0] != "text/plain":
        _description().check(known, answer.status, answer.headers, answer.content)


def _check_agreement(target: str, data: bytes, answer: Answer) -> None:
    """Raises `AssertionError` where the router and the document differ about a body."""
    path = data.split(b" ", 2)[1].decode()
    if target == "allowed":
        is_served = answer.status not in _INVALID or any(each in answer.content for each in (_LIMIT, _CONTEXT))
        assert is_served, f"{path} refuses what the document allows: {answer.content!r}"
    elif target == "damaged" and answer.status not in _REFUSED:
        body = json.loads(data.partition(b"\r\n\r\n")[2])
        errors = [error for error in _description().body_errors(path, body) if not _LAXER.search(error)]
        assert not errors or _has_laxer(body), f"{path} serves what the document forbids: {errors[0]}"


def _has_laxer(body: object) -> bool:
    # An error within variables of templates is reported for the whole choice between them and null.
    return isinstance(body, dict) and bool(body.get("chat_template_kwargs"))


def _allowed(random: Random) -> bytes:
    path = random.choice(_maker().paths)
    return json_request(path, json.dumps(_maker().allowed(path, random), ensure_ascii=random.random() < 0.5).encode())


def _damaged(random: Random) -> bytes:
    path = random.choice(_maker().paths)
    return json_request(path, _maker().damaged(path, random))


def _streamed(random: Random) -> bytes:
    path = random.choice(("/v1/completions", "/v1/chat/completions", "/v1/messages"))
    body = _maker().allowed(path, random) | {"stream": True, "n": random.choice((1, 4, 16))}
    return json_request(path, json.dumps(body).encode())


def _read(random: Random) -> bytes:
    """A GET of an operation, with parameters that its document allows."""
    path = random.choice([path for method, path in OPERATIONS if method == "GET"])
    ids = ("cmpl-x", "x", "0" * 128, "chatcmpl-a.b_c-d:17")
    names = (NAME, "docs.js", "main.js", "a/b", "x")
    filled = path.replace("{id}", random.choice(ids)).replace("{name}", random.choice(names))
    query = random.choice(("", f"?limit={random.choice((1, 5, 999, 1000))}"))
    if path == "/v1/usage":
        query = random.choice(("", "?format=csv", "?from=2026-11-01&to=2026-11-30", "?from=2026-11-30&to=2026-11-01"))
    return get_request(filled + query)


@asynccontextmanager
async def open_feeder() -> AsyncIterator[Feeder]:
    """Starts everything."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = await stack.enter_async_context(PrivateRedis())
        opened = open_cluster(
            redis,
            write_model(directory / NAME),
            {"prefill-0": "prefill", "decode-0": "decode"},
            max_body=1024**2,
            resume_timeout_s=5.0,
            trace_capacity=100,
            scheduling_policy="priority",
            allowed_origins=("https://a.example",),
        )
        errors = Errors()
        logging.getLogger().addHandler(errors)
        stack.callback(logging.getLogger().removeHandler, errors)
        yield HttpFeeder(await stack.enter_async_context(opened), errors)


_TARGETS: dict[str, Callable[[Random], bytes]] = {
    "allowed": _allowed,
    "damaged": _damaged,
    "read": _read,
    "connection": connection,
    "leave": _streamed,
}
AREA = Area(name="http", targets=_TARGETS, open=open_feeder)
