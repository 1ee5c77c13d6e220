"""The router's process: what it opens, how it starts, and how it ends."""

from __future__ import annotations

from pdserve.base.collector import exempt_all
from pdserve.base.logs import get_logger
from pdserve.base.tasks import stop_event_on_signals
from pdserve.net import notify
from pdserve.net.admin import Health
from pdserve.observe import audit
from pdserve.observe.tracing.setup import tracing
from pdserve.peers.secret import read_secret
from pdserve.redis.store import Store
from router_svc.api.served_model import ServedModel
from router_svc.config import RouterConfig
from router_svc.service import Router
from router_svc.state.opening import opened_state
from router_svc.supervisor import NO_DECODE_WORKER

log = get_logger(__name__)


async def serve(config: RouterConfig) -> None:
    """Runs the router until SIGTERM or SIGINT. Raises `SetupError`."""
    stop = stop_event_on_signals(audit.stop_requested)
    health = Health(not_ready=NO_DECODE_WORKER)
    degraded = health.watch("state")
    async with (
        tracing(config, "pdserve-router") as tracer,
        Store(config.redis_url, prefix=config.redis_prefix, on_change=health.watch("redis")) as store,
        opened_state(
            config.state_url,
            ttl_s=config.state_ttl_s,
            prefix=config.redis_prefix,
            on_change=degraded,
            secret=read_secret(config.cluster_secret_file),
        ) as state,
    ):
        texts, form = config.special_tokens_in_text, config.message_format
        models = [
            ServedModel.load(directory, name, special_tokens_in_text=texts, message_format=form)
            for name, directory in config.models.items()
        ]
        router = Router(config, models, store, health, tracer, state)
        exempt_all()
        async with router.serving() as addresses:
            more: dict[str, str | None] = {} if addresses.admin is None else {"admin": addresses.admin}
            more["revision"] = router.cluster.policy.model_revision
            names = ",".join(config.models)
            log.info("router_listening", http=addresses.http, grpc=addresses.grpc, model=names, **more)
            notify.status(NO_DECODE_WORKER)
            await stop.wait()
            audit.action("drain_started", requests=router.num_open)
            log.info("router_draining")
            notify.stopping()
            await router.drain()
            audit.action("drain_ended", requests_left=router.num_open)
