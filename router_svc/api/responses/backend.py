"""Everything behind stored responses."""

from __future__ import annotations

from dataclasses import dataclass

from router_svc.api.responder import Responder
from router_svc.api.responses.background import BackgroundRuns
from router_svc.api.responses.stored import StoredResponses
from router_svc.clients.access import Access
from router_svc.records.stream_seal import StreamSeal
from router_svc.request.cancels import Cancels
from router_svc.state.state_store import StateStore


@dataclass(frozen=True, slots=True)
class ResponsesBackend:
    """What is stored, what runs in the background, and how that is cancelled."""

    stored: StoredResponses
    runs: BackgroundRuns
    cancels: Cancels

    @classmethod
    def of(
        cls, state: StateStore | None, responder: Responder, access: Access, cancels: Cancels
    ) -> ResponsesBackend | None:
        """The backend on a store; None: there is no store."""
        if state is None:
            return None
        stored = StoredResponses(state, StreamSeal(responder.secret))
        return cls(stored, BackgroundRuns(responder, stored, access), cancels)
