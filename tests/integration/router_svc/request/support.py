"""Faults and facts that the tests of requests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdserve.base.ids import RouterId
from pdserve.peers.workers import Tier, WorkerLoad
from router_svc.routing.cluster import TIERS
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.script import Context, Fault
from tests.support.redis import eventually
from tests.support.tiny_model import END, tokens_of

ONE_OF_EACH: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
TEXT = "Hello world."
TOKENS = [*tokens_of(TEXT), END]


def states(record: dict[str, object]) -> list[object]:
    """Tier and attempt of each decision."""
    decisions = record["decisions"]
    assert isinstance(decisions, list)
    return [(decision["tier"], decision["attempt"]) for decision in decisions]


def once_known(
    cluster: ScriptedCluster, condition: Callable[[dict[str, Any]], bool], fault: Fault, *, request_id: str = ""
) -> Fault:
    """`fault`, once the request's record meets the condition. Streams of different workers have no order otherwise.

    `request_id` is what its client has named it, if it has.
    """

    async def is_known() -> bool:
        return condition(await (cluster.trace(request_id) if request_id else cluster.only_trace()))

    async def wait(context: Context) -> None:
        await eventually(is_known)
        await fault(context)

    return wait


def after_first_token(cluster: ScriptedCluster, fault: Fault, *, request_id: str = "") -> Fault:
    """`fault`, once the router has the prefill worker's first token."""
    return once_known(cluster, lambda record: "first_token" in record["phases"], fault, request_id=request_id)


def both(first: Fault, second: Fault) -> Fault:
    """One fault after the other."""

    async def run(context: Context) -> None:
        await first(context)
        await second(context)

    return run


async def announce_keep_alives(cluster: ScriptedCluster, keep_alive_s: float = 0.05) -> None:
    """Makes all workers announce keep-alives, which they do not send, and returns once the router knows."""
    for worker in cluster.workers.values():
        worker.record = replace(worker.record, keep_alive_s=keep_alive_s)
        worker.registrar.announce()

    async def are_known() -> bool:
        known = [worker for tier in TIERS for worker in cluster.router.cluster.ready(tier)]
        return all(worker.keep_alive_s == keep_alive_s for worker in known)

    await eventually(are_known)


async def go_on(_: Context) -> None:
    """No fault."""


async def reports_queued(cluster: ScriptedCluster, router_id: RouterId, tokens: int = 5000) -> None:
    """Makes prefill-0 report queued prompts of one router, and returns once the router has the report."""
    load = WorkerLoad(queued_tokens=tokens, queued_by_router={router_id: tokens}, prefill_tokens_per_s=1000.0)
    cluster.workers["prefill-0"].set(load=load)

    async def is_known() -> bool:
        return cluster.router.cluster.ready("prefill")[0].load == load

    await eventually(is_known)
