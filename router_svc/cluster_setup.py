"""Assembles a router's view of the cluster from its settings, and what is behind each of its models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.model.revision import revision_of
from pdserve.net.rpc import ChannelPool
from pdserve.peers.deaths import requests_of_death
from pdserve.peers.peer_tls import peer_tls
from pdserve.peers.registry import WorkerDirectory
from pdserve.peers.seals import Seals
from pdserve.peers.secret import read_secret
from pdserve.redis.store import Store
from pdserve.v1.decode_pb2 import DecodeResponse
from router_svc.api.models import ModelBackend, Models
from router_svc.api.served_model import ServedModel
from router_svc.config import RouterConfig
from router_svc.records.metrics import RouterMetrics
from router_svc.request.gate import Gate
from router_svc.request.requests import Recorders, Requests
from router_svc.routing.cluster import Cluster, RoutingPolicy
from router_svc.routing.role_orders import order_roles
from router_svc.routing.role_policy import RolePolicy
from router_svc.routing.silence import SilenceLimits
from router_svc.routing.stream_pool import StreamPool
from router_svc.routing.timeouts import TimeoutLimits


def make_cluster(config: RouterConfig, store: Store, mirror: PrefixMirror, metrics: RouterMetrics) -> Cluster:
    """The cluster of the first model. Its directory and certificates have to be run. Raises: SetupError."""
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


def make_models(config: RouterConfig, models: Sequence[ServedModel], cluster: Cluster, recorders: Recorders) -> Models:
    """What is behind each model. `cluster` and `recorders` are the first model's. Others share what is no model's."""
    found = []
    for index, model in enumerate(models):
        if index:
            revision = revision_of(config.models[model.name])
            policy = replace(cluster.policy, model_name=model.name, model_revision=revision)
            cluster = replace(cluster, policy=policy)
            recorders = replace(recorders, metrics=recorders.metrics.of_model(model.name), model_name=model.name)
        gate = Gate(max_waiting=config.max_num_queued_reqs, max_wait_s=config.queue_timeout_s)
        by_priority = config.scheduling_policy == "priority"
        requests = Requests(cluster, gate, recorders, model.tokenizer, by_priority=by_priority)
        found.append(
            ModelBackend(model=model, cluster=cluster, gate=gate, requests=requests, metrics=recorders.metrics)
        )
    return Models(found, config.aliases)


async def role_changes(config: RouterConfig, cluster: Cluster) -> None:
    """Has workers change their role as the settings say. Returns at once if they never should."""
    if config.role_policy == "auto":
        expects_prefill = config.prefill_expected > 0
        await order_roles(cluster, RolePolicy(after_s=config.role_policy_after_s, expects_prefill=expects_prefill))


def _routing_policy(config: RouterConfig) -> RoutingPolicy:
    name, directory = next(iter(config.models.items()))
    return RoutingPolicy(
        model_name=name,
        model_revision=revision_of(directory),
        is_one_of_several=len(config.models) > 1,
        local_prefill_threshold=config.local_prefill_threshold,
        # A threshold of 0 keeps all prompts away from decode workers, regardless of the load.
        local_prefill_by_load=config.local_prefill == "auto" and config.local_prefill_threshold > 0,
        expects_prefill=config.prefill_expected > 0,
        reserve_timeout_s=config.reserve_timeout_s,
        worker_return_timeout_s=config.worker_return_timeout_s,
        max_lost_workers=config.max_lost_workers,
        may_change_numerics=config.on_numerics_change == "continue",
        timeouts=TimeoutLimits(default_s=config.request_timeout_s, max_s=config.max_request_timeout_s),
        silence=SilenceLimits(silence_timeout_s=config.silence_timeout_s, token_timeout_s=config.token_timeout_s),
    )
