"""How streams of the OpenAI API become resumable: their logs, and the ids of their events."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.store import Store
from router_svc.api.event_ids import NAME_CHARACTERS, NOTHING, EventIds, Seen
from router_svc.api.ids import Ids
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.records.stream_log import StreamLog
from router_svc.records.stream_logs import StreamLogs
from router_svc.records.stream_seal import StreamSeal
from router_svc.request.client import Client
from router_svc.routing.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """The streams of this router, and the revision of its model."""

    logs: StreamLogs
    model_revision: str

    def new_log(self, client: Client, request: GenerationRequest, ids: Ids) -> StreamLog | None:
        """The log of a request that is about to run; None: it cannot be resumed."""
        return self.logs.new(owner_of(client), request.resumable(ids.header, self.model_revision))


def owner_of(client: Client) -> str:
    """Whose streams a client may resume: those of its tenant. Without keys, everybody has one."""
    return client.tenant


def event_ids(log: StreamLog, request: GenerationRequest, seen: Seen = NOTHING) -> EventIds:
    """The ids of the events of a stream. Raises `RequestError` when `seen` is of another one."""
    return EventIds(log.nonce[:NAME_CHARACTERS], request.num_choices, seen)


def resuming_of(cluster: Cluster, store: Store, *, ttl_s: float) -> Resuming:
    """How streams of this cluster are resumed. `ttl_s`: for how long; 0: they are not."""
    logs = StreamLogs(store, StreamSeal(cluster.seals.secret), ttl_s=ttl_s)
    return Resuming(logs=logs, model_revision=cluster.policy.model_revision or "")
