"""One run: the undisturbed answers, the same requests under faults, and the check that nothing is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from pdserve.base.errors import PdserveError, StoreError
from pdserve.base.tasks import service_group
from pdserve.cli.bench.environment import describe_client
from pdserve.cli.chaos.answers import Answer
from pdserve.cli.chaos.client import Clients, open_http
from pdserve.cli.chaos.cluster import ChaosCluster, running_cluster
from pdserve.cli.chaos.config import ChaosConfig
from pdserve.cli.chaos.faults import plan
from pdserve.cli.chaos.injector import Injector
from pdserve.cli.chaos.leaks import (
    Footprint,
    footprints,
    grown,
    lasting_keys,
    left_processes,
    left_segments,
    settled,
    shared_memory,
)
from pdserve.cli.chaos.outcome import COMPLETE, LEFT, Outcome
from pdserve.cli.chaos.report import judge, summarize
from pdserve.cli.chaos.workload import ChaosRequest, Sending, burst, distinct_requests, sendings

Say = Callable[[str], None]

#: Requests of one burst of long prompts.
_BURST = 4
_TRACE_TIMEOUT_S = 5.0


async def run(config: ChaosConfig, log_dir: Path, say: Say) -> dict[str, Any]:
    """Runs it all; the summary's `violations` are empty if everything holds. Raises `PdserveError`.

    Raises when the cluster cannot start, or a request fails without a fault.
    """
    segments = shared_memory()
    async with running_cluster(config, log_dir) as cluster:
        say(f"{len(cluster.targets())} processes are ready; logs: {log_dir}")
        async with open_http() as http:
            summary = await _Run(config, cluster, http, say).run()
    summary["violations"] += [*left_processes(), *left_segments(segments, cluster.pids)]
    summary["violations"] += [f"unexplained end: {end}" for end in cluster.unexplained]
    return {
        "environment": describe_client(datetime.now(UTC)),
        "model": cluster.model,
        "settings": {name: value for name, value in asdict(config).items() if name not in ("log_dir", "result")},
        **summary,
    }


class _Run:
    def __init__(self, config: ChaosConfig, cluster: ChaosCluster, http: aiohttp.ClientSession, say: Say) -> None:
        self._config = config
        self._cluster = cluster
        self._http = http
        self._say = say
        self._requests = distinct_requests(config.seed, config.distinct, max_output_len=config.max_output_len)
        self._outcomes: list[Outcome] = []
        #: Numbers of the requests in bursts come after all others.
        self._next_number = config.requests

    async def run(self) -> dict[str, Any]:
        """The summary so far, with the cluster still running."""
        expected = await self._undisturbed()
        baseline = await self._at_rest()
        started_at = time.time()
        injector = await self._disturbed(expected)
        took_s = time.time() - started_at
        violations = await settled(self._http, self._cluster, self._config.settle_timeout_s)
        violations += grown(baseline, footprints(self._cluster)) if not self._cluster.waited_for() else []
        violations += await self._keys()
        summary = summarize(
            self._outcomes,
            expected,
            injected=injector.injected,
            skipped=injector.skipped,
            started_at=started_at,
        )
        summary["faults"] = {"carried_out": injector.num_faults, "kills": injector.num_kills, **summary["faults"]}
        failures = [f"request {each['number']} is {each['status']}: {each['reason']}" for each in summary["failures"]]
        return {"duration_s": round(took_s, 1), **summary, "violations": [*failures, *violations]}

    async def _undisturbed(self) -> dict[int, Answer]:
        """The answers without faults, by the index of the request. Raises `PdserveError` when one fails."""
        clients = self._clients(f"undisturbed-{self._config.seed}")
        sent = [Sending(number=each.index, request=each, cache_salt=None, router=0) for each in self._requests]
        outcomes = await _all(clients, sent, self._config.concurrency)
        for outcome in outcomes:
            if outcome.status != COMPLETE:
                raise PdserveError(f"A request failed without any fault: {outcome.error}. Look at the logs.")
        self._say(f"{len(outcomes)} different requests are answered without faults")
        return {each.sending.request.index: each.answer for each in outcomes}

    async def _at_rest(self) -> dict[str, Footprint]:
        """Resources of the idle cluster. Raises `PdserveError` when it holds something after an undisturbed run."""
        if held := await settled(self._http, self._cluster, self._config.settle_timeout_s):
            raise PdserveError(f"The cluster holds something without any fault: {'; '.join(held)}.")
        return footprints(self._cluster)

    async def _disturbed(self, expected: dict[int, Answer]) -> Injector:
        config = self._config
        clients = self._clients(f"chaos-{config.seed}")
        todo = iter(sendings(config.seed, self._requests, config.requests, num_routers=config.routers))
        async with service_group() as faults, asyncio.TaskGroup() as senders:

            async def ask(sending: Sending) -> None:
                outcome = await clients.ask(sending)
                outcome.trace = await self._trace(outcome)
                self._note(outcome, expected)

            async def ask_in_turn() -> None:
                for sending in todo:
                    await ask(sending)

            in_burst: list[asyncio.Task[None]] = []

            def send_burst() -> bool:
                # Else a machine slower than the plan would have nothing else to compute.
                if not all(task.done() for task in in_burst):
                    return False
                in_burst[:] = [senders.create_task(ask(sending)) for sending in self._burst(self._requests)]
                return True

            injector = Injector(self._cluster, clients, send_burst)
            lanes = [senders.create_task(ask_in_turn()) for _ in range(config.concurrency)]
            planned = plan(config.seed, interval_s=config.fault_interval_s, kinds=config.faults)
            faults.start(injector.run(planned), name="faults")
            await asyncio.wait(lanes)
            faults.stop()
        return injector

    def _burst(self, requests: list[ChaosRequest]) -> list[Sending]:
        first, self._next_number = self._next_number, self._next_number + _BURST
        return burst(self._config.seed, requests, first, _BURST, num_routers=self._config.routers)

    def _note(self, outcome: Outcome, expected: dict[int, Answer]) -> None:
        self._outcomes.append(outcome)
        status, reason = judge(outcome, expected[outcome.sending.request.index])
        if status not in (COMPLETE, LEFT):
            self._say(f"request {outcome.sending.number} is {status}: {reason}")
        if len(self._outcomes) % 100 == 0:
            self._say(f"{len(self._outcomes)} requests have ended")

    async def _trace(self, outcome: Outcome) -> dict[str, object] | None:
        """The decision record, while a router or Redis still has it."""
        for url in self._cluster.urls:
            try:
                async with (
                    asyncio.timeout(_TRACE_TIMEOUT_S),
                    self._http.get(f"{url}/v1/requests/{outcome.request_id}/trace") as response,
                ):
                    found = await response.json()
                    if response.status == 200 and "decisions" in found:
                        return found  # type: ignore[no-any-return]
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
        return None

    async def _keys(self) -> list[str]:
        try:
            return await lasting_keys(self._cluster.redis_url)
        except StoreError as error:
            return [f"Redis does not answer: {error}"]

    def _clients(self, prefix: str) -> Clients:
        return Clients(
            self._http,
            model=self._cluster.model,
            urls=self._cluster.urls,
            choose=self._cluster.router,
            prefix=prefix,
            timeout_s=self._config.timeout_s,
        )


async def _all(clients: Clients, sent: Sequence[Sending], concurrency: int) -> list[Outcome]:
    slots = asyncio.Semaphore(concurrency)

    async def ask(sending: Sending) -> Outcome:
        async with slots:
            return await clients.ask(sending)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(sending)) for sending in sent]
    return [task.result() for task in tasks]
