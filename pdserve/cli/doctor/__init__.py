"""`pdserve doctor`: checks this machine and a running cluster, and says what to do about each finding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.config import load, option
from pdserve.base.errors import PdserveError, Unauthorized
from pdserve.base.option_values import parse_bytes
from pdserve.cli.doctor.cluster_checks import check_cluster, check_redis
from pdserve.cli.doctor.facts import ClusterFacts
from pdserve.cli.doctor.finding import Finding, error, exit_status, info
from pdserve.cli.doctor.gather import ProbePlan, cluster_facts
from pdserve.cli.doctor.machine_checks import check_machine
from pdserve.cli.doctor.report import as_json, show
from pdserve.cli.router_client import DEFAULT_BASE_URL, get_model, normal_base_url
from pdserve.cli.status import ClusterStatus
from pdserve.cli.worker_calls import WorkerCallOptions
from pdserve.model.fetch.cache import default_cache_dir
from pdserve.observe.facts.machine import machine_facts
from pdserve.observe.facts.redis import redis_facts
from pdserve.peers.peer_tls import peer_tls
from pdserve.redis.redis_keys import DEFAULT_PREFIX, parse_prefix
from pdserve.redis.store import Store

_HERE = "this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig(WorkerCallOptions):
    """Settings of `pdserve doctor`."""

    base_url: str | None = option(
        None, help=f"address of the router; default: {DEFAULT_BASE_URL}, if one answers there", metavar="URL"
    )
    json: bool = option(False, help="print JSON instead of text")
    redis_url: str | None = option(None, help="Redis to check from here, too", metavar="URL")
    redis_prefix: str = option(
        DEFAULT_PREFIX, help="what the names of all keys in Redis begin with", metavar="PREFIX", parse=parse_prefix
    )
    max_pairs: int = option(
        16, help="most pairs of workers between which a transfer is tested; 0: none", metavar="N", minimum=0
    )
    transfer_size: int = option(32 << 20, help="size of a test transfer, such as 32MiB", parse=parse_bytes)


def main(argv: Sequence[str]) -> int:
    """Prints all findings. Returns 0 for nothing to do, 1 for warnings, 2 for errors. Raises `PdserveError`."""
    config = load(DoctorConfig, "doctor", argv, description=__doc__)
    findings, cluster = asyncio.run(diagnose(config))
    if config.json:
        print(as_json(findings, () if cluster is None else cluster.pairs))
    else:
        show(findings)
    return exit_status(findings)


async def diagnose(config: DoctorConfig) -> tuple[list[Finding], ClusterFacts | None]:
    """All findings, and the facts of the cluster if one was found. Raises `PdserveError`."""
    findings = check_machine(machine_facts([default_cache_dir()]), _HERE)
    if config.redis_url is not None:
        async with Store(config.redis_url, prefix=config.redis_prefix) as store:
            findings += check_redis(await redis_facts(store), _HERE)
    base_url = normal_base_url(config.base_url or DEFAULT_BASE_URL)
    try:
        status = await asyncio.to_thread(get_model, base_url, "/v1/cluster", ClusterStatus, config.api_key)
    except PdserveError as failure:
        findings.append(_without_cluster(config, base_url, failure))
        return findings, None
    plan = ProbePlan(
        max_pairs=config.max_pairs,
        num_bytes=config.transfer_size,
        tls=peer_tls(config),
        seals=config.seals(base_url),
    )
    cluster = await cluster_facts(status, base_url, plan)
    return findings + check_cluster(cluster), cluster


def _without_cluster(config: DoctorConfig, base_url: str, failure: PdserveError) -> Finding:
    if isinstance(failure, Unauthorized):
        return error("router", "router", str(failure), "Give an admin's key with --api-key or PDSERVE_API_KEY.")
    if config.base_url is None:
        found = f"no router answers at {base_url}: only this machine was checked"
        return info("router", "router", found, "Start a cluster with pdserve up, or name its router with --base-url.")
    remedy = "Start the router, or correct --base-url; check its --host and firewalls."
    return error("router", "router", str(failure), remedy)
