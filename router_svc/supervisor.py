"""What the router reports to a supervisor such as `pdserve up`: what it waits for, and that it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pdserve.net import notify
from router_svc.routing.cluster import Cluster

NO_DECODE_WORKER = "no decode worker is ready"
NO_PREFILL_WORKER = "no prefill worker is ready"


#: Time between two signs of life.
_ALIVE_EACH_S = 1.0


async def report_alive() -> None:
    """Reports to a supervisor that the event loop runs. The supervisor ends a process that stops reporting this."""
    while True:
        notify.alive()
        await asyncio.sleep(_ALIVE_EACH_S)


async def report_to_supervisor(
    clusters: Sequence[Cluster], rehearse: Callable[[], Awaitable[None]], is_draining: Callable[[], bool]
) -> None:
    """Reports that the router is ready once both tiers of each model are, and what is missing before, until it drains.

    Probes need only decode workers. Before the first report, `rehearse` sends a request through the cluster.
    Returns at once without a supervisor: nobody waits for the report then.
    """
    if not notify.has_listener():
        return
    has_rehearsed = False
    reported: str | None = ""
    while not is_draining():
        directory = clusters[0].directory
        version = directory.version
        missing = missing_workers(clusters)
        if missing is not None:
            notify.status(missing)
        elif missing != reported:
            if not has_rehearsed:
                has_rehearsed = True
                notify.status("sending a first request through the cluster")
                await rehearse()
            await notify.report_ready()
        reported = missing
        await directory.wait_for_change(version)


def missing_workers(clusters: Sequence[Cluster]) -> str | None:
    """Which tier has no worker that is ready; of several models, each that lacks one is named. None: all have."""
    found = [(cluster.policy.model_name, missing) for cluster in clusters if (missing := _missing(cluster)) is not None]
    if len(clusters) == 1:
        return found[0][1] if found else None
    return "; ".join(f"{name}: {missing}" for name, missing in found) or None


def _missing(cluster: Cluster) -> str | None:
    if not cluster.ready("decode"):
        return NO_DECODE_WORKER
    if cluster.policy.expects_prefill and not cluster.ready("prefill"):
        return NO_PREFILL_WORKER
    return None
