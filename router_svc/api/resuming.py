"""How streams become resumable, and are taken over from other routers; shared by all APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.errors import NotFound, RequestError, StaleError
from router_svc.api.event_ids import NAME_CHARACTERS, NOTHING, EventIds, Seen
from router_svc.api.ids import is_traceable_id
from router_svc.api.models import Models
from router_svc.generation import Generation
from router_svc.records.resumable import ResponseShape, Resumable
from router_svc.records.stream_log import StreamLog
from router_svc.records.stream_logs import StreamLogs
from router_svc.records.traces import ID_PREFIXES
from router_svc.request.client import Client

#: The APIs: a stream is resumed in that of its request.
HTTP, GRPC = "http", "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """The streams of this router, and the models that they may be of."""

    logs: StreamLogs
    #: Revisions of the models by their names; empty: the model is of no hub.
    revisions: Mapping[str, str]

    def new_log(
        self, client: Client, api: str, shape: ResponseShape, generations: Sequence[Generation]
    ) -> StreamLog | None:
        """The log of a request that is about to run; None: it cannot be resumed."""
        if not self.logs.is_on:
            return None
        revision = self.revisions[shape.model]
        resumable = Resumable(shape=shape, generations=tuple(generations), model_revision=revision)
        return self.logs.new(_owner_of(client, api), resumable)

    async def found(self, client: Client, api: str, given_id: str, seen: Seen) -> tuple[StreamLog, bool]:
        """The stream of this id, and whether it is complete. It stays on its router until it is taken.

        Raises:
            NotFound: the client has no such stream. The error does not say whether other clients have it.
            StaleError: it is of another model.
            RequestError, StoreError: the id cannot be one; Redis is away.
        """
        if not self.logs.is_on:
            raise NotFound("Streams of this server cannot be resumed. Start its routers with --resume-timeout-s.")
        for header_id in _header_ids(given_id):
            found = await self.logs.find(_owner_of(client, api), header_id, seen.name)
            if found is not None:
                self._require_same_model(found[0].resumable)
                return found
        raise NotFound(
            "There is no stream of this id that can be resumed: it is unknown, has failed, or ended too long "
            "ago. Send the request again."
        )

    def _require_same_model(self, resumable: Resumable) -> None:
        made_by = _model_name(resumable.shape.model, resumable.model_revision)
        served = [_model_name(*each) for each in self.revisions.items()]
        if made_by not in served:
            raise StaleError(
                f"The stream is of the model {made_by}, and this router serves {', '.join(served)}. Resume it on a "
                "router of the former, or send the request again."
            )


def event_ids(log: StreamLog, seen: Seen = NOTHING) -> EventIds:
    """The ids of the events of a stream. Raises `RequestError` when `seen` is of another stream."""
    num_choices = sum(generation.sampling.n for generation in log.resumable.generations)
    return EventIds(log.nonce[:NAME_CHARACTERS], num_choices, seen, can_be_resumed=lambda: log.is_stored)


def resuming_of(models: Models, logs: StreamLogs) -> Resuming:
    """How streams of these models are resumed."""
    return Resuming(logs=logs, revisions={backend.name: backend.revision for backend in models})


def _owner_of(client: Client, api: str) -> str:
    """Whose streams a client may resume: its tenant's. Without keys, all clients are one."""
    return f"{api}/{client.tenant}"


def _model_name(name: str, revision: str) -> str:
    return f"{name}@{revision}" if revision else name


def _header_ids(given: str) -> Iterator[str]:
    """What X-Request-Id may have been: the id itself, or the rest of the response's id. Raises `RequestError`."""
    if not is_traceable_id(given):
        raise RequestError(
            "The id is not valid. Request ids have letters, digits, '.', '_' and '-', at most 128.", param="id"
        )
    yield given
    for prefix in ID_PREFIXES:
        if given.startswith(prefix):
            yield given.removeprefix(prefix)
