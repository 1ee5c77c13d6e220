"""The small HTTP server of each process: /livez, /readyz, /health and /metrics."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field

from aiohttp import web, web_response, web_urldispatcher
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from pdserve.base.errors import Forbidden, SetupError, codes_of
from pdserve.net.hosts import AllowedHosts
from pdserve.net.http_limits import SERVER_SETTINGS, LimitedConnection, UnreadableForm, plain_error
from pdserve.net.silent_connections import FIRST_REQUEST_S, IDLE_S, SilentConnections
from pdserve.observe.http_log import ServerLog

# aiohttp answers broken HTTP without an application, and its own header has the versions of aiohttp and of Python.
web_response.SERVER_SOFTWARE = "pdserve"  # type: ignore[attr-defined]
#: Connections that wait to be accepted.
_BACKLOG = 1024
_continue = web_urldispatcher._default_expect_handler


async def _expectation(request: web.Request) -> None:
    """Answers `Expect: 100-continue`. Other values get 417; aiohttp's handler fails with a value that is no text."""
    try:
        await _continue(request)
    except UnicodeEncodeError:
        raise web.HTTPExpectationFailed(text="Unknown Expect") from None


web_urldispatcher._default_expect_handler = _expectation


@dataclass(slots=True)
class Health:
    """The state that the probes report: alive from the start, ready between loading and draining."""

    #: Why the process is not ready ("loading", "draining", ...); None while it is.
    not_ready: str | None = "loading"
    #: Cause of death; None while the process is alive.
    dead: str | None = None
    #: Why the process, though alive, makes no progress; None while it does.
    stalled: str | None = None
    #: Why the process seems to make no progress; None while it does. It is not ready then, but needs no restart yet.
    hung: str | None = None
    #: Reasons for degraded service, such as an unreachable Redis, by subject.
    degraded: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether the process accepts new work."""
        return self.not_ready is None and self.hung is None and self.is_live

    @property
    def is_live(self) -> bool:
        """Whether the process can go on without a restart."""
        return self.dead is None and self.stalled is None

    def watch(self, subject: str) -> Callable[[str | None], None]:
        """A callback that takes the reason why `subject` is degraded, or None when it has recovered."""

        def on_change(reason: str | None) -> None:
            if reason is None:
                self.degraded.pop(subject, None)
            else:
                self.degraded[subject] = reason

        return on_change

    def describe(self) -> dict[str, object]:
        """The body of /health."""
        broken = "dead" if self.dead else "stalled" if self.stalled else "hung" if self.hung else None
        state = broken or ("ready" if self.is_ready else "not_ready")
        return {
            "status": state,
            "reason": self.dead or self.stalled or self.hung or self.not_ready,
            "degraded": self.degraded,
        }


def health_routes(health: Health, registry: CollectorRegistry) -> list[web.RouteDef]:
    """The four routes that every process has."""
    return [*probe_routes(health), *metrics_routes(registry)]


def probe_routes(health: Health) -> list[web.RouteDef]:
    """The routes that an orchestrator or a load balancer asks about the process."""

    async def livez(_: web.Request) -> web.Response:
        return web.json_response(health.describe(), status=200 if health.is_live else 503)

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response(health.describe(), status=200 if health.is_ready else 503)

    return [
        web.get("/livez", livez),
        web.get("/readyz", readyz),
        web.get("/health", readyz),
    ]


class _Counted(CollectorRegistry):
    """Metrics as they were at one time."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        return iter(self._families)


def metrics_routes(registry: CollectorRegistry) -> list[web.RouteDef]:
    """The route that Prometheus reads."""

    async def metrics(request: web.Request) -> web.Response:
        # Clients that ask for OpenMetrics, as Prometheus does, get it with exemplars. Others get the text format.
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except TypeError:  # prometheus_client compares the parts of a version as they were sent: "1.x" with (1, 0, 0)
            encode, content_type = choose_encoder("")
        # What is counted belongs to the event loop; writing it down takes as long as all of it, and does not.
        counted = _Counted(list(registry.collect()))
        body = await asyncio.to_thread(encode, counted)
        return web.Response(body=body, headers={"Content-Type": content_type})

    return [web.get("/metrics", metrics)]


def bound_socket(host: str, port: int, *, flag: str) -> socket.socket:
    """A listening TCP socket; port 0 takes any free port. Raises `SetupError` naming the flag to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise SetupError(
            f"Cannot listen on {host}:{port}: {reason}. Free the port, or choose another one with {flag}."
        ) from error
    listener.setblocking(False)
    return listener


@asynccontextmanager
async def serve_http(
    app: web.Application,
    listener: socket.socket,
    *,
    grace_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
    first_request_s: float = FIRST_REQUEST_S,
    unreadable: UnreadableForm = plain_error,
) -> AsyncIterator[str]:
    """Serves `app` on `listener` until the block ends; yields `host:port`.

    A connection without a request is closed after `first_request_s`. `unreadable` makes the answers to what is not
    HTTP, and to headers beyond the limits.
    """
    silent = SilentConnections(first_request_s)
    silent.watch(app)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=grace_s)
    await runner.setup()
    server, loop, server_log = runner.server, asyncio.get_running_loop(), ServerLog()
    assert server is not None

    def connection() -> LimitedConnection:
        settings = SERVER_SETTINGS | {"loop": loop, "logger": server_log, "keepalive_timeout": IDLE_S}
        return LimitedConnection(server, unreadable, **settings)

    try:
        accepting = await loop.create_server(connection, sock=listener, ssl=tls, backlog=_BACKLOG)
        host, port = listener.getsockname()[:2]
        with closing(accepting), silent.swept(server):
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_admin(health: Health, registry: CollectorRegistry, listener: socket.socket) -> AsyncIterator[str]:
    """Serves the four routes until the block ends; yields `host:port`."""
    app = web.Application(middlewares=[_known_hosts(AllowedHosts.of_listener(listener.getsockname()[0]))])
    app.add_routes(health_routes(health, registry))
    async with serve_http(app, listener) as address:
        yield address


def _known_hosts(allowed: AllowedHosts) -> Middleware:
    """A middleware that refuses requests under names that are not allowed."""

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            allowed.check(request.headers.getall("Host", ()))
        except Forbidden as error:
            return web.json_response({"error": str(error)}, status=codes_of(error).http)
        return await handler(request)

    return checked
