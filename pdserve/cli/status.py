"""`pdserve status`: the workers of a running cluster, their load and their health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.base.config import load, option
from pdserve.cli.router_client import DEFAULT_BASE_URL, get, normal_base_url, parse

_PATH = "/v1/cluster"
_BAR_CELLS = 5
#: Width from which the table shows the workers' addresses.
_WIDE_CELLS = 90
#: Enough of a commit to know it by.
_COMMIT_DIGITS = 12
_TIERS = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusConfig:
    """Settings of `pdserve status`."""

    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")
    api_key: str | None = option(None, help="API key; default: the variable PDSERVE_API_KEY", metavar="KEY")
    json: bool = option(False, help="print the router's JSON answer instead of a table")


class ModelStatus(BaseModel):
    """State of one of several models."""

    model: str
    model_revision: str | None = None


class RouterStatus(BaseModel):
    """State of the router."""

    status: str
    reason: str | None = None
    degraded: dict[str, str] = {}
    version: str = ""
    model: str = ""
    model_revision: str | None = None
    running: int = 0
    queued: int = 0
    #: Empty where there is only one model.
    models: list[ModelStatus] = []

    @property
    def all_models(self) -> list[ModelStatus]:
        """All models of the router."""
        return self.models or [ModelStatus(model=self.model, model_revision=self.model_revision)]


class RedisStatus(BaseModel):
    """State of Redis, as the router sees it."""

    available: bool


class TransportStatus(BaseModel):
    """Paths of a worker's blocks to other workers."""

    paths: dict[str, int] = {}
    degraded: str | None = None


class WorkerStatus(BaseModel):
    """State of one worker, as the router sees it."""

    worker_id: str
    tier: str
    ready: bool
    epoch: int
    grpc_address: str
    http_address: str
    model: str = ""
    max_num_seqs: int
    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    queued_tokens: int
    prefill_tokens_per_s: float | None = None
    transport: TransportStatus = TransportStatus()

    @property
    def kv_use(self) -> float:
        """Fraction of KV blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


class ClusterStatus(BaseModel):
    """The answer of `GET /v1/cluster`."""

    router: RouterStatus
    redis: RedisStatus
    workers: list[WorkerStatus]

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served, be it in degraded mode."""
        return self.router.status == "ready" and any(
            worker.ready and worker.tier == "decode" for worker in self.workers
        )


def main(argv: Sequence[str]) -> int:
    """Prints the cluster's state. Returns exit code 1 when the cluster does not serve. Raises `PdserveError`."""
    config = load(StatusConfig, "status", argv, description=__doc__)
    base_url = normal_base_url(config.base_url)
    body = get(base_url, _PATH, config.api_key)
    cluster = parse(body, ClusterStatus, base_url + _PATH)
    if config.json:
        print(body.decode())
    else:
        console = Console(highlight=False)
        console.print(render(cluster, base_url, width=console.width))
    return 0 if cluster.is_healthy else 1


def render(cluster: ClusterStatus, base_url: str, *, width: int) -> RenderableType:
    """Lines about the router and degraded subjects, then one row per worker, for a terminal of `width` cells."""
    return Group(*_headline(cluster, base_url), Text(), _worker_table(cluster, wide=width >= _WIDE_CELLS))


def _headline(cluster: ClusterStatus, base_url: str) -> list[Text]:
    router = cluster.router
    first = Text(f"{base_url}  ")
    if cluster.is_healthy:
        first.append("degraded" if router.degraded else "healthy", style="yellow" if router.degraded else "green")
    else:
        first.append(f"not serving ({router.reason or 'no decode worker is ready'})", style="red")
    first.append(f"  {', '.join(map(_named, router.all_models))}  pdserve {router.version}")
    second = Text(f"requests: {router.running} running, {router.queued} queued   redis: ")
    second.append("available" if cluster.redis.available else "unreachable", "" if cluster.redis.available else "red")
    return [first, second, *(Text(f"{what}: {why}", style="yellow") for what, why in router.degraded.items())]


def _named(model: ModelStatus) -> str:
    return model.model + ("" if model.model_revision is None else f"@{model.model_revision[:_COMMIT_DIGITS]}")


def _worker_table(cluster: ClusterStatus, *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names, has_several = [each.model for each in cluster.router.all_models], len(cluster.router.models) > 1
    for name in ("worker", *(["model"] if has_several else []), "tier", "state"):
        table.add_column(name)
    for name in ("running", "waiting", "tokens", "KV in use"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("path", no_wrap=True)
        table.add_column("metrics at", no_wrap=True)
    for worker in sorted(cluster.workers, key=_order):
        table.add_row(
            worker.worker_id,
            *([worker.model] if has_several else []),
            worker.tier,
            Text("ready", style="green") if worker.ready else Text("not ready", style="yellow"),
            f"{worker.running}/{worker.max_num_seqs}",
            str(worker.waiting),
            str(worker.queued_tokens),
            f"{_bar(worker.kv_use)} {worker.kv_use:4.0%}",
            *((_paths(worker.transport), worker.http_address) if wide else ()),
        )
    for tier in _TIERS:
        for name in names:
            if not any(worker.tier == tier and (not has_several or worker.model == name) for worker in cluster.workers):
                shown = Text("no worker", style="yellow" if tier == "prefill" else "red")
                table.add_row("-", *([name] if has_several else []), tier, shown)
    return table


def _order(worker: WorkerStatus) -> tuple[int, str]:
    return (_TIERS.index(worker.tier) if worker.tier in _TIERS else len(_TIERS)), worker.worker_id


def _paths(transport: TransportStatus) -> Text:
    """Paths of a worker's blocks; in yellow when one is slower than expected."""
    return Text(" ".join(transport.paths) or "-", style="yellow" if transport.degraded else "")


def _bar(share: float) -> str:
    filled = round(share * _BAR_CELLS)
    return "█" * filled + "░" * (_BAR_CELLS - filled)
