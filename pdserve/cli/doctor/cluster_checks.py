"""Checks of a running cluster, from facts alone. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from pdserve.cli.doctor.facts import ClusterFacts, PairProbe
from pdserve.cli.doctor.finding import Finding, error, info, ok, warning
from pdserve.cli.doctor.machine_checks import check_machine
from pdserve.observe.facts.cluster import RedisFacts, WorkerFacts

_GB = 1e9
#: Clocks that differ by more spoil traces and logs; by much more, leases that one process writes and another reads.
_SKEW_S, _LARGE_SKEW_S = 0.5, 5.0
_SLOW_REDIS_S = 0.01
_MIN_REDIS = (5, 0)
#: Share of a plain copy's speed below which a path within a host is slow whatever its name.
_MIN_SHARE_OF_COPY = 0.02
_LOCAL_PATHS = ("local", "cma", "shm")


def check_cluster(facts: ClusterFacts) -> list[Finding]:
    """All findings about a running cluster."""
    return [finding for check in _CHECKS for finding in check(facts)]


def check_redis(facts: RedisFacts, seen_from: str) -> list[Finding]:
    """All findings about one Redis as `seen_from` somewhere."""
    return list(_redis(facts, seen_from))


def _router(facts: ClusterFacts) -> Iterator[Finding]:
    router = facts.router
    if not router.is_ready:
        remedy = "Start the missing workers, or read the router's log; docs/operations/troubleshooting.md."
        yield error("router", "router", f"not ready: {router.reason or 'no reason given'}", remedy)
    else:
        yield ok("router", "router", f"ready at {router.base_url}")
    is_path_found = any(pair.cause for pair in facts.pairs)
    for subject, reason in router.degraded.items():
        if subject != "transport" or not is_path_found:  # The finding about the pair says more.
            yield warning("degraded", "router", f"{subject}: {reason}", "See docs/operations/troubleshooting.md.")


def _tiers(facts: ClusterFacts) -> Iterator[Finding]:
    for tier in ("prefill", "decode"):
        ready = [worker for worker in facts.workers if worker.tier == tier and worker.is_ready]
        if ready:
            yield ok("tiers", tier, f"{len(ready)} workers ready")
        elif tier == "decode":
            yield error("tiers", tier, "no worker is ready", "Start a decode worker and read its log.")
        else:
            remedy = "Start a prefill worker. Without one, decode workers prefill."
            yield warning("tiers", tier, "no worker is ready", remedy)
    for worker in facts.workers:
        if not worker.is_ready:
            remedy = "Wait while it loads or drains; else read its /readyz and its log."
            yield warning("tiers", worker.worker_id, "registered, but not ready", remedy)


def _reachable(facts: ClusterFacts) -> Iterator[Finding]:
    for worker in facts.workers:
        if "UNIMPLEMENTED" in worker.error:
            found = "it runs a version of pdserve that cannot be examined"
            yield warning("versions", worker.worker_id, found, "Run one version of pdserve in all processes.")
        elif worker.error:
            yield warning(
                "reachable",
                worker.worker_id,
                f"{worker.grpc_address} does not answer here: {worker.error}",
                "Run doctor where the router runs (docker compose exec, kubectl exec). If it fails there too, check "
                "the worker's --host, firewalls and network policies.",
            )


def _versions(facts: ClusterFacts) -> Iterator[Finding]:
    versions = {worker.worker_id: worker.machine.version for worker in _described(facts)}
    versions["the router"] = facts.router.version
    yield from _same("versions", versions, "versions", "Run one version of pdserve in all processes.")


def _layouts(facts: ClusterFacts) -> Iterator[Finding]:
    described = _described(facts)
    prefill = [worker for worker in described if worker.tier == "prefill"]
    for worker in (worker for worker in described if worker.tier == "decode"):
        if prefill and all(other.layout != worker.layout for other in prefill):
            different = "; ".join(
                f"{name} is {mine!r}, and {theirs!r} on {prefill[0].worker_id}"
                for name, mine, theirs in worker.layout.differences(prefill[0].layout)
            )
            remedy = "Start both tiers with the same model, --dtype, --kv-cache-dtype and --block-size."
            yield error("layouts", worker.worker_id, f"no prefill worker has its KV layout: {different}", remedy)
    transports = {worker.worker_id: worker.transport for worker in described}
    yield from _same("layouts", transports, "transports", "Start both tiers with the same --transport.")


def _instruction_sets(facts: ClusterFacts) -> Iterator[Finding]:
    sets = {worker.worker_id: worker.instruction_set or worker.kernels for worker in _described(facts)}
    yield from _same(
        "instruction_sets",
        sets,
        "kernels",
        "Answers may differ in the last bits between workers. Give all of them one --instruction-set, the least of "
        "their best ones.",
    )


def _clocks(facts: ClusterFacts) -> Iterator[Finding]:
    skews = [worker for worker in facts.workers if worker.facts is not None]
    for worker in skews:
        certain_s = max(0.0, abs(worker.clock_skew_s) - worker.clock_error_s)
        direction = "ahead of" if worker.clock_skew_s > 0 else "behind"
        found = f"its clock is {abs(worker.clock_skew_s):.1f} s {direction} the one here"
        remedy = "Synchronize the clocks of all hosts (chrony, systemd-timesyncd)."
        if certain_s > _LARGE_SKEW_S:
            yield error("clocks", worker.worker_id, found, remedy)
        elif certain_s > _SKEW_S:
            yield warning("clocks", worker.worker_id, found, remedy)
    if skews:
        largest = max(abs(worker.clock_skew_s) for worker in skews)
        yield ok("clocks", "workers", f"largest difference to the clock here: {largest * 1000:.0f} ms")


def _redis_of_all(facts: ClusterFacts) -> Iterator[Finding]:
    if not facts.router.has_redis:
        remedy = "Start Redis, or check its address, password and network; serving goes on without it, degraded."
        yield error("redis", "router", "Redis cannot be used", remedy)
    first: dict[str, WorkerFacts] = {}
    for worker in _described(facts):
        first.setdefault(worker.redis.address, worker)
        if worker.redis.error:
            yield from _redis(worker.redis, worker.worker_id)
    for worker in first.values():
        if not worker.redis.error:
            yield from _redis(worker.redis, worker.worker_id)
    if len(first) > 1:
        yield warning(
            "redis",
            "workers",
            f"workers use {len(first)} addresses of Redis: {', '.join(sorted(first))}",
            "Unless these are names of one Redis, give all processes the same --redis-url.",
        )


def _redis(facts: RedisFacts, seen_from: str) -> Iterator[Finding]:
    if facts.error:
        yield error("redis", seen_from, facts.error, "Start Redis, or check its address, password and network.")
        return
    yield ok("redis", seen_from, f"Redis {facts.version} at {facts.address}, {facts.latency_s * 1000:.1f} ms away")
    if facts.version and _version(facts.version) < _MIN_REDIS:
        yield error("redis", seen_from, f"Redis {facts.version} has no streams", "Use Redis 5 or later.")
    if facts.latency_s > _SLOW_REDIS_S:
        found = f"Redis is {facts.latency_s * 1000:.0f} ms away"
        yield warning("redis", seen_from, found, "Run Redis near the workers, and on a machine that is not overloaded.")
    if facts.max_memory_bytes and facts.eviction != "noeviction":
        yield warning(
            "redis",
            seen_from,
            f"Redis evicts keys ({facts.eviction}) at {facts.max_memory_bytes >> 20} MiB, workers' records among them",
            "Set maxmemory-policy noeviction, and maxmemory to more than is used.",
        )
    if facts.max_memory_bytes and facts.used_memory_bytes > 0.9 * facts.max_memory_bytes:
        found = f"Redis uses {facts.used_memory_bytes >> 20} of {facts.max_memory_bytes >> 20} MiB"
        yield warning("redis", seen_from, found, "Raise maxmemory.")


def _pairs(facts: ClusterFacts) -> Iterator[Finding]:
    on_gpus = {each.worker_id for each in facts.workers if each.facts is not None and each.facts.device != "cpu"}
    for pair in facts.pairs:
        yield _pair(pair, on_gpus=not on_gpus.isdisjoint((pair.prefill, pair.decode)))
    if len(facts.pairs) < facts.num_pairs:
        found = f"{len(facts.pairs)} of {facts.num_pairs} pairs of workers tested"
        yield info("transfers", "workers", found, "Test more with --max-pairs.")


def _pair(pair: PairProbe, *, on_gpus: bool) -> Finding:
    subject = f"{pair.prefill} to {pair.decode}"
    if pair.is_busy:
        return info("transfers", subject, "not tested: the workers serve requests", "Repeat when they are idle.")
    if pair.error:
        remedy = "docs/operations/troubleshooting.md, section Transfers fail; docs/operations/transports.md."
        return error("transfers", subject, f"the test transfer failed: {pair.error}", remedy)
    share = pair.bytes_per_s / pair.memory_copy_bytes_per_s if pair.memory_copy_bytes_per_s else 0.0
    speed = f"{pair.bytes_per_s / _GB:.2f} GB/s"
    of_what = " of host memory" if on_gpus else ""
    how = f" ({pair.protocol})" if pair.protocol else ""
    found = f"{pair.actual or 'path unknown'}{how}{of_what}, {speed}, {share:.0%} of a plain copy"
    if pair.cause:
        return warning(
            "transfers",
            subject,
            f"{pair.actual} instead of {pair.expected}: {pair.cause}; {speed}, {share:.0%} of a plain copy",
            pair.remedy,
        )
    if pair.actual in _LOCAL_PATHS and share < _MIN_SHARE_OF_COPY:
        remedy = "See whether other programs keep the cores busy, and repeat on an idle machine."
        return warning("transfers", subject, f"{found}: slow for this path", remedy)
    return ok("transfers", subject, found)


def _machines(facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about workers' machines that need something done."""
    for worker in _described(facts):
        for finding in check_machine(worker.machine, worker.worker_id, is_loaded=True):
            if finding.remedy:
                yield finding


def _described(facts: ClusterFacts) -> list[WorkerFacts]:
    return [worker.facts for worker in facts.workers if worker.facts is not None]


def _same(check: str, values: dict[str, str], what: str, remedy: str) -> Iterator[Finding]:
    """A warning that names who has which value, unless all have the same."""
    owners: dict[str, list[str]] = defaultdict(list)
    for owner, value in values.items():
        owners[value].append(owner)
    if len(owners) > 1:
        found = "; ".join(f"{value}: {', '.join(names)}" for value, names in owners.items())
        yield warning(check, "cluster", f"different {what}: {found}", remedy)
    elif owners:
        yield ok(check, "cluster", f"same {what} everywhere: {next(iter(owners))}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".")[:2] if number.isdigit())


_CHECKS: tuple[Callable[[ClusterFacts], Iterator[Finding]], ...] = (
    _router,
    _tiers,
    _reachable,
    _versions,
    _layouts,
    _instruction_sets,
    _clocks,
    _redis_of_all,
    _pairs,
    _machines,
)
