"""What a worker that fails by itself leaves in Redis: the requests in its last step.

The note is written before the worker closes its connections, so a router that loses the worker finds it at once.
Without a note, the worker was killed or its machine is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from pdserve.base.errors import StoreError
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.base.logs import get_logger
from pdserve.redis.store import Argument, Reply, Store, as_bytes

log = get_logger(__name__)

DEATH_KEY = "death:"
_TTL_S = 900
#: Maximum number of calls until one reaches Redis. On a busy machine an answer can take longer than a call's deadline,
#: and a death without a note counts as one from outside. All calls take less time than a failed thread is held.
_TRIES = 3


async def note_death(store: Store, worker_id: WorkerId, epoch: Epoch, requests: Collection[RequestId]) -> None:
    """Notes that this worker fails by itself, in a step with these requests. Logs it if Redis is away."""
    try:
        note = ("SET", _key(store, worker_id, epoch), "\n".join(requests), "EX", _TTL_S)
        await _call(store, *note, tries=_TRIES)
    except StoreError as error:
        log.warning("death_not_noted", worker=worker_id, reason=error)


async def requests_of_death(store: Store, worker_id: WorkerId, epoch: Epoch) -> frozenset[RequestId] | None:
    """The requests in the last step of a worker that has failed by itself; None if it has not, or nobody knows."""
    try:
        # A recovery waits for this. In an outage it does not wait for each lost worker anew.
        tries = _TRIES if store.available else 1
        noted = await _call(store, "GET", _key(store, worker_id, epoch), tries=tries)
        # Ids that no request has are no harm.
        names = None if noted is None else as_bytes(noted).decode(errors="replace").split("\n")
    except StoreError:
        return None
    return None if names is None else frozenset(map(RequestId, names))


async def _call(store: Store, *command: Argument, tries: int) -> Reply:
    """Runs a command that may run more than once. Raises `StoreError`."""
    for _ in range(tries - 1):
        with contextlib.suppress(StoreError):
            return await store.call(*command)
    return await store.call(*command)


def _key(store: Store, worker_id: WorkerId, epoch: Epoch) -> str:
    return store.key(f"{DEATH_KEY}{worker_id}:{epoch}")
