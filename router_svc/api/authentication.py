"""Keys in requests: HTTP and gRPC find out who calls, before anything is read or done.

The route that was resolved decides, never the text of the path or the Host header. Access is denied by default: a new
endpoint needs a key unless it is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
from aiohttp import web
from aiohttp.typedefs import Middleware

from pdserve.base.errors import Forbidden
from router_svc.api.guards import Handler
from router_svc.clients.access import Access, credentials_of
from router_svc.request.client import Client

#: What a client has left of its limits, as headers.
LimitHeaders = Callable[[Client], Mapping[str, str]]
#: Key of the client that was found.
CLIENT = web.RequestKey("client", Client)

#: Probes have no key. Nor has the browser that loads the console's page, which then asks for one, or a client of
#: Ollama's API that looks whether it is there. The reference shows the public schema and nothing of this router, as
#: gRPC's reflection does.
OPEN_ROUTES = frozenset(
    {
        "/",
        "/livez",
        "/readyz",
        "/health",
        "/console",
        "/console/",
        "/console/{name}",
        "/openapi.json",
        "/docs",
        "/docs/",
        "/docs/{name}",
    }
)
#: What shows the cluster, or the requests of all tenants.
METRICS_ROUTE = "/metrics"
ADMIN_ROUTES = frozenset({METRICS_ROUTE, "/v1/cluster", "/console/events"})


def authentication(access: Access) -> Middleware:
    """A middleware that finds the client of each request. Raises `Unauthorized` and `Forbidden`."""

    @web.middleware
    async def authenticated(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = None if resource is None else resource.canonical
        if route not in OPEN_ROUTES:
            headers = request.headers
            presented = credentials_of(headers.getall("Authorization", ()), headers.getall("x-api-key", ()))
            client = access.client(presented, request.remote or "")
            _check_route(client, route, request.path)
            request[CLIENT] = client
        return await handler(request)

    return authenticated


def _check_route(client: Client, route: str | None, path: str) -> None:
    """Raises `Forbidden` for what this client may not use."""
    if client.reads_metrics_only:
        if route != METRICS_ROUTE:
            raise Forbidden(f"The API key {client.id} may read {METRICS_ROUTE} and nothing else.")
    elif route in ADMIN_ROUTES and not client.is_admin:
        raise Forbidden(f"The API key {client.id} may not read {path[:100]}. It takes an admin's key.")


def no_limit_headers(client: Client) -> Mapping[str, str]:
    """No client has limits."""
    return {}


def add_limit_headers(app: web.Application, limit_headers: LimitHeaders) -> None:
    """Tells clients with limits in every answer what they have left."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        client = request.get(CLIENT)
        if client is not None and client.limits is not None:
            response.headers.update(limit_headers(client))

    app.on_response_prepare.append(add)


def client_of(request: web.Request) -> Client:
    """Who sent the request. Not for open routes, whose clients are not looked for."""
    client: Client = request[CLIENT]
    return client


def scope_of(request: web.Request) -> str | None:
    """The tenant whose requests and usage the caller may see; None: all."""
    client = client_of(request)
    return None if client.is_admin else client.tenant


def caller_of_rpc(context: grpc.aio.ServicerContext[Any, Any], access: Access) -> Client:
    """Who calls. Raises `Unauthorized` and `Forbidden`."""
    metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    authorization, x_api_key = ([v for k, v in metadata if k == name] for name in ("authorization", "x-api-key"))
    client = access.client(credentials_of(authorization, x_api_key), host_of(context.peer()))
    if client.reads_metrics_only:
        raise Forbidden(f"The API key {client.id} may read {METRICS_ROUTE} over HTTP and nothing else.")
    return client


def host_of(peer: str) -> str:
    """The address in gRPC's name of a peer, such as `ipv4:10.0.0.7:5121` or `ipv6:%5B::1%5D:5121`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]") or peer
