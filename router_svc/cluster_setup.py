"""Assembles a router's view of the cluster from its settings: policy, registry, channels, secret and certificates."""

from __future__ import annotations

from functools import partial

from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.base.deaths import requests_of_death
from pdserve.base.peer_tls import peer_tls
from pdserve.base.registry import WorkerDirectory
from pdserve.base.rpc import ChannelPool
from pdserve.base.seals import Seals
from pdserve.base.secret import read_secret
from pdserve.base.store import Store
from pdserve.base.stream_pool import StreamPool
from pdserve.model.revision import revision_of
from pdserve.v1.decode_pb2 import DecodeResponse
from router_svc.config import RouterConfig
from router_svc.records.metrics import RouterMetrics
from router_svc.routing.cluster import Cluster, RoutingPolicy
from router_svc.routing.role_orders import order_roles
from router_svc.routing.role_policy import RolePolicy
from router_svc.routing.silence import SilenceLimits
from router_svc.routing.timeouts import TimeoutLimits


def make_cluster(config: RouterConfig, store: Store, mirror: PrefixMirror, metrics: RouterMetrics) -> Cluster:
    """The cluster, whose directory and certificates have to be run. Raises: SetupError."""
    seals = Seals(read_secret(config.cluster_secret_file), on_refused=metrics.peer_refused)
    tls = peer_tls(config)
    return Cluster(
        policy=_routing_policy(config),
        directory=WorkerDirectory(store, seals=seals),
        index=mirror.overlap,
        requests_of_death=partial(requests_of_death, store),
        channels=ChannelPool(tls=tls),
        seals=seals,
        tls=tls,
        streams=StreamPool(DecodeResponse.FromString, tls),
    )


async def role_changes(config: RouterConfig, cluster: Cluster) -> None:
    """Has workers change their role as the settings say. Returns at once if they never should."""
    if config.role_policy == "auto":
        expects_prefill = config.prefill_expected > 0
        await order_roles(cluster, RolePolicy(after_s=config.role_policy_after_s, expects_prefill=expects_prefill))


def _routing_policy(config: RouterConfig) -> RoutingPolicy:
    return RoutingPolicy(
        model_name=config.model_name,
        model_revision=revision_of(config.model_dir),
        local_prefill_threshold=config.local_prefill_threshold,
        # A threshold of 0 keeps all prompts away from decode workers, regardless of the load.
        local_prefill_by_load=config.local_prefill == "auto" and config.local_prefill_threshold > 0,
        expects_prefill=config.prefill_expected > 0,
        reserve_timeout_s=config.reserve_timeout_s,
        worker_return_timeout_s=config.worker_return_timeout_s,
        may_change_numerics=config.on_numerics_change == "continue",
        timeouts=TimeoutLimits(default_s=config.request_timeout_s, max_s=config.max_request_timeout_s),
        silence=SilenceLimits(silence_timeout_s=config.silence_timeout_s, token_timeout_s=config.token_timeout_s),
    )
