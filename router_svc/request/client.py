"""Who sent a request, as fairness, limits and tenants see it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from router_svc.generation import Generation
from router_svc.request.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A key's owner, or without keys an address."""

    id: str = ""
    #: Share of the cluster relative to other clients while requests wait.
    weight: float = 1.0
    #: Clients of one tenant share cached prefixes and see each other's traces. Empty: there are no keys.
    tenant: str = ""
    #: Whether it sees the cluster, and the requests of all tenants.
    is_admin: bool = False
    #: Whether it may read metrics and do nothing else.
    reads_metrics_only: bool = False
    #: The lowest value, hence the most urgent, that its requests may have as `priority`; None: any.
    priority_ceiling: int | None = None
    #: What it may use; None: all it wants.
    limits: Limits | None = None
    #: Models that it may use; empty: all.
    models: frozenset[str] = frozenset()

    def own(self, generation: Generation) -> Generation:
        """The generation with the client's tenant, and a cache salt that isolates it from other tenants."""
        return replace(generation, tenant=self.tenant, cache_salt=self.salt(generation.cache_salt))

    def salt(self, cache_salt: bytes) -> bytes:
        """The salt that isolates the client's prefixes. Two tenants get two salts from the same `cache_salt`."""
        if not self.tenant:
            return cache_salt
        tenant = hashlib.sha256(self.tenant.encode()).digest()
        return hashlib.blake2b(cache_salt, key=tenant, digest_size=16, person=b"pdserve-tenant").digest()


#: The router itself, and callers that do not say who they are.
ANONYMOUS = Client()
