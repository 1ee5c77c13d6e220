"""Cancels requests by their ids, on whichever router they run.

A router that does not have the request adds a wish to a stream in Redis, which all routers follow. The one that has it
ends the work, and then answers in a list that belongs to this wish. Requests that are never cancelled cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from dataclasses import asdict, dataclass

from pydantic_core import from_json

from pdserve.base.errors import StoreError
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup, service_group
from pdserve.peers.secret import ClusterSecret
from pdserve.redis.store import Reply, Store, as_bytes, as_list
from router_svc.request.open_requests import OpenRequests

log = get_logger(__name__)

KEY = "cancels"
#: Prefix of the key of the answers to one wish.
ANSWER_KEY = "cancelled:"
#: What the MAC of a wish is for.
_PURPOSE = "cancel"
#: Time for which a wish holds, so that one that was copied ends no later request with its id.
_LIFE_S = 60.0
_MAX_WISHES = 1024
_BLOCK_S = 5.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request is to be cancelled. `tenant`: whose it must be; None: any."""

    nonce: str
    request_id: str
    tenant: str | None
    at: float


class Cancels:
    """Cancels requests of this router and, while `run` runs, for the other routers."""

    def __init__(
        self, open_requests: OpenRequests, store: Store, secret: ClusterSecret | None = None, *, answer_s: float = 0.5
    ) -> None:
        """`answer_s`: time that the other routers have to answer."""
        self._open = open_requests
        self._store = store
        self._secret = secret
        self._answer_s = answer_s
        self._seen: deque[str] = deque(maxlen=_MAX_WISHES)

    async def cancel(self, request_id: str, tenant: str | None) -> bool:
        """Cancels the requests with this id, and returns when their work has ended. False: no router has one.

        With `tenant`, only its own. Raises `StoreError` when other routers cannot be asked.
        """
        return await self._open.cancel(request_id, tenant) or await self._ask(request_id, tenant)

    async def _ask(self, request_id: str, tenant: str | None) -> bool:
        wish = Wish(nonce=secrets.token_hex(8), request_id=request_id, tenant=tenant, at=time.time())
        self._seen.append(wish.nonce)
        text = json.dumps(asdict(wish)).encode()
        mac = b"" if self._secret is None or not self._secret.signs else self._secret.mac(_PURPOSE, text)
        key = self._store.key(KEY)
        await self._store.pipeline(
            [
                ["XADD", key, "MAXLEN", "~", _MAX_WISHES, "*", "wish", text, "mac", mac],
                ["PEXPIRE", key, int(_LIFE_S * 1000)],
            ]
        )
        answers = self._store.key(ANSWER_KEY + wish.nonce)
        answer = await self._store.call("BLPOP", answers, f"{self._answer_s:g}", block_s=self._answer_s)
        return answer is not None

    async def run(self) -> None:
        """Fulfils the wishes of other routers until cancelled."""
        async with service_group() as group:
            position: str | None = None
            while True:
                try:
                    position = await self._follow(group, position or await self._now())
                except StoreError:  # The store logs outages.
                    position = None
                    await asyncio.sleep(_RETRY_S)

    async def _now(self) -> str:
        """The position in the stream behind all wishes so far."""
        seconds, micros = as_list(await self._store.call("TIME"))
        return f"{int(as_bytes(seconds)) * 1000 + int(as_bytes(micros)) // 1000}-0"

    async def _follow(self, group: ServiceGroup, position: str) -> str:
        """Reads what comes next, and returns the position behind it."""
        arguments = ("COUNT", 64, "BLOCK", int(_BLOCK_S * 1000), "STREAMS", self._store.key(KEY), position)
        reply = await self._store.call("XREAD", *arguments, block_s=_BLOCK_S)
        for stream in [] if reply is None else as_list(reply):
            _, entries = as_list(stream)
            for entry in as_list(entries):
                entry_id, fields = as_list(entry)
                position = as_bytes(entry_id).decode(errors="replace")
                wish = self._wish(fields)
                if wish is not None and self._open.has(wish.request_id, wish.tenant):
                    group.start(self._fulfil(wish), name="cancel")
        return position

    async def _fulfil(self, wish: Wish) -> None:
        if not await self._open.cancel(wish.request_id, wish.tenant):
            return
        key = self._store.key(ANSWER_KEY + wish.nonce)
        try:
            await self._store.pipeline([["RPUSH", key, "1"], ["PEXPIRE", key, int(_LIFE_S * 1000)]])
        except StoreError as error:
            log.warning("cancellation_not_answered", reason=error)

    def _wish(self, fields: Reply) -> Wish | None:
        """The wish; None: it is a stranger's, a copy, too old, or this router's own."""
        try:
            _, text, _, mac = map(as_bytes, as_list(fields))
            if self._secret is not None and not (mac or self._secret.accepts_open):
                return None
            if self._secret is not None and mac and not self._secret.matches(mac, _PURPOSE, text):
                return None
            found = from_json(text, allow_inf_nan=False)
            wish = Wish(
                nonce=str(found["nonce"])[:32],
                request_id=str(found["request_id"]),
                tenant=None if found["tenant"] is None else str(found["tenant"]),
                at=float(found["at"]),
            )
        except (StoreError, ValueError, TypeError, KeyError):
            return None
        if wish.nonce in self._seen or abs(time.time() - wish.at) > _LIFE_S:
            return None
        self._seen.append(wish.nonce)
        return wish
