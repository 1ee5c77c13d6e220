"""What a worker answers that cannot change its role."""

from __future__ import annotations

from pdserve.base.errors import RequestError
from pdserve.peers.workers import Tier


def fixed_role(tier: Tier) -> RequestError:
    """The error of a service that has one tier for life."""
    return RequestError(
        f"This worker has the role {tier} for life. Start it as python -m worker_svc.{tier}, as `pdserve up` does on "
        "CPUs, to change its role."
    )
