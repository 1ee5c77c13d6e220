"""Carries out the role policy: asks workers to change their role when a tier has lost all of its workers."""

from __future__ import annotations

import asyncio

from pdserve.base.errors import PdserveError
from pdserve.base.logs import get_logger
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.observe import audit
from pdserve.peers.seals import Purpose
from pdserve.v1 import diagnostics_pb2 as pb
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc
from router_svc.routing.cluster import TIERS, Cluster
from router_svc.routing.role_policy import RoleOrder, RolePolicy

log = get_logger(__name__)

#: Time between two looks at the workers.
_LOOK_S = 0.5
_CALL_TIMEOUT_S = 5.0


async def order_roles(cluster: Cluster, policy: RolePolicy) -> None:
    """Runs until cancelled. An order that fails is given again, perhaps to another worker, if the tier stays empty."""
    loop = asyncio.get_running_loop()
    while True:
        ready = [worker for tier in TIERS for worker in cluster.ready(tier)]
        order = policy.next(ready, is_readable=not cluster.directory.degraded, now=loop.time())
        if order is not None:
            await _give(cluster, order)
        await asyncio.sleep(_LOOK_S)


async def _give(cluster: Cluster, order: RoleOrder) -> None:
    worker = order.worker
    audit.action("role_ordered", worker=worker.worker_id, role=order.role)
    request = cluster.sealed(Purpose.ROLE, worker, pb.ChangeRoleRequest(role=order.role, reason="policy"))
    try:
        async with cluster.channels.use(worker.worker_id, worker.epoch, worker.grpc_address) as channel:
            with mapped_rpc_errors(f"worker {worker.worker_id}"):
                await pb_grpc.DiagnosticsServiceStub(channel).ChangeRole(request, timeout=_CALL_TIMEOUT_S)
    except PdserveError as error:
        log.warning("role_refused", worker=worker.worker_id, role=order.role, reason=error)
