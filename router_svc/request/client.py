"""Who sent a request, as fairness and limits see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A key's owner, or without keys an address."""

    id: str = ""
    #: Share of the cluster relative to other clients while requests wait.
    weight: float = 1.0


#: The router itself, and callers that do not say who they are.
ANONYMOUS = Client()
