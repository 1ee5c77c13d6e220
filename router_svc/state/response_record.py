"""One response as it is stored: what was sent, what came of it, and what another router needs to go on with it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pdserve.base.errors import Unreadable
from pdserve.base.json_lines import on_one_line
from router_svc.records.stream_seal import StreamSeal
from router_svc.state.sealed import opened, sealed
from router_svc.state.state_store import group_of

#: States in which nothing changes any more.
TERMINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResponse:
    """A response as clients get it, at one time."""

    id: str
    status: str
    #: As JSON, which is sent as it is: with log-probabilities it is long.
    body: bytes
    #: Its items, as a conversation goes on from them.
    output: Sequence[Mapping[str, Any]] = ()

    @property
    def is_terminal(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in TERMINAL

    def ended(self, status: str, error: Mapping[str, Any] | None) -> ShownResponse:
        """The response with another status. Only for a response without output."""
        body = json.dumps(json.loads(self.body) | {"status": status, "error": error}, ensure_ascii=False)
        return replace(self, status=status, body=on_one_line(body.encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """A stored response."""

    #: Whose it is.
    tenant: str
    #: The key that sent it.
    key_id: str
    response: ShownResponse
    #: The conversation that was sent, with all before it.
    items: list[Any]
    #: Where the items of this request start.
    first_own_item: int
    #: Seconds that it may take, and when it came, in Unix time.
    timeout_s: float = 0.0
    arrived_at: float = 0.0
    #: The request as it was admitted, in base64; empty: it did not run in the background.
    request: str = ""
    #: How often routers have started it.
    attempts: int = 1
    #: Events to its end; 0: it has not ended, or no router has made them to the end.
    num_events: int = 0

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response.id

    @property
    def is_terminal(self) -> bool:
        """Whether nothing changes any more."""
        return self.response.is_terminal

    @property
    def expires_at(self) -> float:
        """When it ends at the latest, in Unix time."""
        return self.arrived_at + self.timeout_s

    def request_bytes(self) -> bytes:
        """The request as it was admitted."""
        return base64.b64decode(self.request)


def record_key(tenant: str, response_id: str) -> str:
    """The key of a record. Tenants are names of any form, and one must never find the response of another one."""
    return f"{tenant_name(tenant)}:{response_id}"


def is_response_key(key: str) -> bool:
    """Whether this is the key of a response. The groups of other records have more than the tenant in their name."""
    return "-" not in group_of(key)


def tenant_name(tenant: str) -> str:
    """What the keys of a tenant's records begin with."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()


def record_to_bytes(record: ResponseRecord, key: str, seal: StreamSeal) -> bytes:
    """The record, compressed and sealed. Takes some milliseconds for a long one. Raises `TooLarge`."""
    head = {each.name: getattr(record, each.name) for each in fields(record)}
    response = record.response
    head["response"] = {"id": response.id, "status": response.status, "output": response.output}
    # The response follows in a line of its own, so that it can be shown without being parsed.
    return sealed(b"%b\n%b" % (json.dumps(head).encode(), response.body), key, seal)


def record_from_bytes(data: bytes, key: str, seal: StreamSeal) -> ResponseRecord:
    """The record of these bytes. Raises `Unreadable`."""
    try:
        first, _, body = opened(data, key, seal).partition(b"\n")
        head = json.loads(first)
        return ResponseRecord(**head | {"response": ShownResponse(**head["response"], body=body)})
    except (ValueError, TypeError, KeyError) as error:
        raise Unreadable(f"The stored response cannot be read: {error!r:.200}.") from error
