"""The state that the console shows: the cluster as `GET /v1/cluster` has it, loads, problems and recent requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kvtransfer.index.prefix_mirror import PrefixMirror
from pdserve.base.ids import WorkerId
from pdserve.peers.workers import Tier, WorkerRecord
from router_svc.api.console.load import LoadHistory, LoadSample, TierLoad, load_of
from router_svc.api.console.problems import Observed, Problem, find_problems
from router_svc.api.models import Models
from router_svc.api.openai.info import OperatorApi
from router_svc.records.record_json import Json
from router_svc.records.traces import Traces
from router_svc.routing.cluster import TIERS

#: Requests shown.
NUM_REQUESTS = 100
#: Window for the growth of the queue, and for failures.
_QUEUE_WINDOW_S, _FAILURE_WINDOW_S = 60.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that the state is read from."""

    operator: OperatorApi
    models: Models
    traces: Traces
    mirror: PrefixMirror
    #: Limit of each model's queue.
    max_queued: int
    clock: Callable[[], float] = time.time


class ClusterState:
    """Reads the state, and keeps the course of the load."""

    def __init__(self, sources: Sources, *, history: LoadHistory) -> None:
        self._sources = sources
        self.history = history

    def now(self) -> float:
        """Unix time."""
        return self._sources.clock()

    def sample(self) -> LoadSample:
        """The load now, which also becomes the latest sample of the history."""
        router = self._sources.operator.describe_router()
        prefill, decode = (load_of(self._workers_of(tier)) for tier in TIERS)
        sample = LoadSample(
            at=round(self.now(), 3),
            running=cast(int, router["running"]),
            queued=cast(int, router["queued"]),
            prefill_queued_tokens=prefill.queued_tokens,
            prefill_kv_use=prefill.kv_use,
            decode_kv_use=decode.kv_use,
            decode_running=decode.running,
            decode_waiting=decode.waiting,
        )
        self.history.add(sample)
        return sample

    def read(self) -> dict[str, Json]:
        """The state as JSON; workers and requests are objects by id."""
        described = cast("dict[str, Json]", self._sources.operator.describe())
        router = cast("dict[str, Json]", described["router"])
        requests = [*self._sources.traces.newest(NUM_REQUESTS)]
        tiers: dict[Tier, TierLoad] = {tier: load_of(self._workers_of(tier)) for tier in TIERS}
        problems = self._problems(router, tiers, requests)
        return {
            **described,
            "limits": {
                "max_queued": self._sources.max_queued * len(self._sources.models),
                "expects_prefill": self._sources.models.first.cluster.policy.expects_prefill,
            },
            "tiers": {tier: load.as_json() for tier, load in tiers.items()},
            "problems": [problem.as_json() for problem in problems],
            "prefix": self._prefix(),
            "workers": self._worker_rows(cast("list[dict[str, Json]]", described["workers"])),
            "requests": {str(request["request_id"]): request for request in requests},
        }

    def _workers_of(self, tier: Tier) -> list[WorkerRecord]:
        return [worker for backend in self._sources.models for worker in backend.cluster.workers_of(tier)]

    def _worker_rows(self, workers: Sequence[dict[str, Json]]) -> dict[str, Json]:
        counts = self._sources.mirror.index.block_counts()
        return {
            str(worker["worker_id"]): {**worker, "cached_blocks": counts.get(WorkerId(str(worker["worker_id"])), 0)}
            for worker in workers
        }

    def _prefix(self) -> dict[str, Json]:
        mirror = self._sources.mirror
        return {
            "blocks": mirror.index.num_blocks,
            "copies": mirror.index.entries,
            "dropped": mirror.index.dropped,
            "current": not mirror.degraded,
        }

    def _problems(
        self, router: Mapping[str, Json], tiers: Mapping[Tier, TierLoad], requests: Sequence[Mapping[str, Json]]
    ) -> list[Problem]:
        models, now = self._sources.models, self.now()
        cluster = models.first.cluster
        recent = [each for each in requests if cast(float, each["accepted_at"]) >= now - _FAILURE_WINDOW_S]
        ended = [each for each in recent if each["state"] in ("finished", "failed")]
        errors = [cast("dict[str, Json]", each["outcome"])["error"] for each in ended if each["state"] == "failed"]
        return find_problems(
            Observed(
                status=str(router["status"]),
                reason=cast("str | None", router["reason"]),
                degraded=cast("dict[str, str]", router["degraded"]),
                models=[backend.name for backend in models],
                expects_prefill=cluster.policy.expects_prefill,
                workers=[worker for tier in TIERS for worker in cluster.directory.workers_of(tier)],
                tiers=tiers,
                queued=max(backend.gate.num_waiting for backend in models),
                max_queued=self._sources.max_queued,
                history=self.history.since(now - _QUEUE_WINDOW_S),
                ended=len(ended),
                failed=len(errors),
                last_error=str(errors[0]) if errors else "",
            )
        )
