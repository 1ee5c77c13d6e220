"""The error that ends a request for which no decode worker is left."""

from __future__ import annotations

from pdserve.base.errors import NoWorkers, PdserveError, StaleError, TransferError
from router_svc.request.placer import Placer
from router_svc.routing.cluster import Cluster
from router_svc.routing.home import Home


def error_for_client(refusal: PdserveError, cluster: Cluster, placer: Placer, home: Home) -> PdserveError:
    """What the last worker's error means for the client.

    `home`: where the last tokens come from.
    """
    ready = cluster.ready("decode")
    if ready and not any(map(placer.is_understood_by, ready)):
        return NoWorkers(
            "No decode worker that is ready knows all fields of the request, such as structured output. Update the "
            "workers, or leave the fields out."
        )
    if ready and not any(map(placer.fits_on, ready)):
        longest = max(worker.max_model_len for worker in ready)
        return NoWorkers(
            f"The request may take {placer.max_len} tokens with its prompt, and the decode workers that are ready "
            f"hold {longest} at most. Retry later, or lower max_tokens."
        )
    if isinstance(refusal, (TransferError, StaleError)) and not ready:
        # What is missing is a worker, whichever one was lost: the same request may succeed later.
        return NoWorkers(f"{refusal} {cluster.policy.no_decode_worker}")
    if cluster.policy.may_change_numerics:
        return refusal
    return home.refusal(cluster.ready("decode", home.layout)) or refusal
