"""What all calls of the gRPC API have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, cast

import grpc

from pdserve.base.errors import RequestError
from pdserve.base.ids import RequestId
from router_svc.api.authentication import LimitHeaders
from router_svc.api.ids import is_valid_id
from router_svc.request.client import Client
from router_svc.request.open_requests import OpenRequest, OpenRequests

_BEFORE_DEADLINE_S = 0.02
Context = grpc.aio.ServicerContext[Any, Any]


def opened_call(
    requests: OpenRequests, request_id: RequestId, client: Client, context: Context
) -> AbstractAsyncContextManager[OpenRequest]:
    """The request, until the caller's deadline within the limit, or for the default time."""
    left_s = cast(float | None, context.time_remaining())  # Its type knows no call without a deadline.
    if left_s is None:
        timeout_s = requests.limits.of_header(None)
    else:
        # The call itself ends at its deadline. A little earlier, the record names the deadline as the reason.
        timeout_s = min(max(left_s - _BEFORE_DEADLINE_S, 0.0), requests.limits.max_s)
    return requests.entered(request_id, client.tenant, timeout_s)


@contextmanager
def limits_shown(limit_headers: LimitHeaders, client: Client, context: Context) -> Iterator[None]:
    """At the end of the block, sends a client with limits what it has left of them."""
    try:
        yield
    finally:
        if client.limits is not None:
            context.set_trailing_metadata(tuple(limit_headers(client).items()))


def require_id(request_id: str) -> None:
    """Raises `RequestError` for an id that a client may not choose. Empty: it has chosen none."""
    if request_id and not is_valid_id(request_id):
        raise RequestError("`request_id` may have letters, digits, '.', '_' and '-', at most 128.", param="request_id")
