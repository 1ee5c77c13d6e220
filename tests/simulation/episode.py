"""One episode: a cluster serves a thousand requests under a hundred faults, and then nothing may be wrong or left.

- Every stream is what an undisturbed model would have said: tokens, text, log-probabilities, reason, usage.
- No request fails: at least one worker of each tier is always expected back.
- When all is quiet, every block is free, and no call, transfer, receive, lease, slot or count is left.
- No task of a live process has failed unnoticed. After a regular end, no task is left, and Redis has only what expires.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from tests.simulation import determinism, tcp
from tests.simulation.clients import CALM_S, ENDED_BY_CLIENT, Client, Workload
from tests.simulation.cluster import SimulatedCluster, random_plan
from tests.simulation.engine import STEP_CLOCK, SimulatedStepLoop
from tests.simulation.faults import Faults, plan_faults
from tests.simulation.loop import Process, SimulatedLoop, Stuck
from tests.simulation.network import Network
from tests.simulation.phases import Phases
from tests.simulation.vocabulary import vocabularies
from tests.simulation.worker import LONGEST_PROMPT

#: Requests per virtual second, on average.
_RATE = 25.0
#: Virtual time in which everything has to become quiet after the last request: leases and closing timeouts end in it.
_QUIET_S = 150.0


@dataclass
class Report:
    """What an episode has shown."""

    seed: int
    requests: int
    faults: int
    violations: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    fault_kinds: dict[str, int] = field(default_factory=dict)
    #: Phases of moves and copies, and how often an aimed fault has hit each.
    phases: dict[str, int] = field(default_factory=dict)
    phases_hit: dict[str, int] = field(default_factory=dict)
    trace: str = ""
    messages: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    #: Virtual seconds of the longest requests.
    slowest_s: list[float] = field(default_factory=list)

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


class _Errors(logging.Handler):
    """Collects what the product logs as errors: none of these faults is one."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        cause = "" if not record.exc_info else f": {record.exc_info[1]!r}"
        self._found.append(f"logged as an error: {record.name} {record.getMessage()} {fields}{cause}")


class Episode:
    """Runs once, in a Python process of its own."""

    def __init__(self, seed: int, num_requests: int, num_faults: int, *, print_line: Any = None) -> None:
        self._chance = Random(seed)
        self.report = Report(seed, num_requests, num_faults)
        self.loop = SimulatedLoop(Random(self._chance.getrandbits(64)))
        determinism.take_over(self.loop, Random(self._chance.getrandbits(64)))
        _replace_engine()
        STEP_CLOCK.chance = Random(self._chance.getrandbits(64))
        self.network = Network(self.loop, Random(self._chance.getrandbits(64)))
        self.loop.network = self.network
        self.network.print_line = print_line
        tcp.install(self.network)
        self._errors: list[str] = []
        logging.getLogger().setLevel(logging.ERROR)
        logging.getLogger().addHandler(_Errors(self._errors))
        self.clients: list[Client] = []
        self._phases = Phases()

    def run(self) -> Report:
        """The report of the whole episode."""
        started = time.process_time()
        report = self.report
        asyncio.set_event_loop(self.loop)
        main = self.loop.create_task(self._run(), context=Context())
        try:
            self.loop.run_until_complete(main)
        except Stuck as stuck:
            report.violations.append(f"stuck: {stuck}")
        report.violations += self.loop.unnoticed + self._errors
        report.trace, report.messages = self.network.trace, self.network.num_messages
        report.virtual_s = round(self.loop.time(), 3)
        report.cpu_s = round(time.process_time() - started, 3)
        return report

    async def _run(self) -> None:
        report, chance, loop = self.report, self._chance, self.loop
        plan = random_plan(chance)
        threshold = chance.choice((0, 6, 16))
        resume_s = 60.0 * (report.seed % 2)
        cluster = self.cluster = SimulatedCluster(self.network, plan, threshold=threshold, resume_timeout_s=resume_s)
        await self._until(lambda: cluster.all_ready, 60.0)
        duration_s = max(2.0, report.requests / _RATE)
        self._phases.cluster = cluster
        faults = Faults(cluster, self._phases)
        for fault in plan_faults(chance, report.faults, duration_s):
            loop.call_later(fault.at, faults.strike, fault, context=Context())
        crowd = Process("clients")
        workload = Workload(chance, LONGEST_PROMPT, plan.longest_output, impatience=0.12 if report.faults else 0.6)
        tasks = []
        for number in range(report.requests):
            prompts = workload.prompts(number)
            client = Client(self.network, crowd, prompts, workload.behaviour(len(prompts)), may_resume=resume_s > 0)
            self.clients.append(client)
            names = chance.sample(cluster.router_names, len(cluster.router_names))
            tasks.append(loop.start(crowd, self._request(client, workload.arrival(duration_s), names), "client"))
        await asyncio.wait(tasks)
        self._judge()
        await self._quiet(cluster)
        report.fault_kinds = dict(sorted((faults.done | cluster.wire_faults.done).items()))
        await self._end(cluster)

    async def _request(self, client: Client, at: float, routers: list[str]) -> None:
        await asyncio.sleep(at)
        started = self.loop.time()
        await client.run(routers)
        self.report.slowest_s = sorted([*self.report.slowest_s, round(self.loop.time() - started, 3)])[-5:]
        self.network.note("client", client.request_id, client.outcome)
        if not self.report.faults:
            times = [router.times.get(client.request_id) for router in self.cluster.routers.values()]
            if (wrong := client.fault_in_calm(*next(filter(None, times), (0.0, 0.0)))) is not None:
                self.report.violations.append(f"request {client.request_id}: {wrong}")
            if client.outcome in ENDED_BY_CLIENT:
                await self._require_freed(client)

    async def _require_freed(self, client: Client) -> None:
        """Without faults, every worker lets go of a request at once that its client has ended."""
        await asyncio.sleep(CALM_S)
        request_id = client.request_id
        self.report.violations += [
            f"request {request_id} was {client.outcome} {CALM_S} s ago, and {worker.name} still has it"
            for worker in self.cluster.workers.values()
            if worker.has(request_id)
        ]

    def _judge(self) -> None:
        counts = Counter(dict.fromkeys(("done", *ENDED_BY_CLIENT), 0))
        counts.update({f"moved: {reason}": count for reason, count in self._phases.moved.items()})
        for client in self.clients:
            counts[client.outcome] += 1
            counts["routers lost"] += client.lost_routers
            counts["resumed"] += client.resumed
            counts["joined"] += client.joined
            counts["refused for a long queue"] += client.refusals
            counts["turned away by a router that ends"] += client.turned_away
            wrong = client.fault()
            if wrong is not None:
                self.report.violations.append(f"request {client.request_id}: {wrong}")
        self.report.outcomes = dict(sorted(counts.items()))
        self.report.phases, self.report.phases_hit = self._phases.seen, self._phases.hit

    async def _quiet(self, cluster: SimulatedCluster) -> None:
        """Waits until nothing is held, at most for as long as a lease and a closing connection may take."""
        cluster.wire_faults.planned.clear()
        await self._until(lambda: cluster.all_ready and not cluster.leftovers(), _QUIET_S)
        self.report.violations += [f"left over: {each}" for each in cluster.leftovers()]
        if not cluster.all_ready:
            self.report.violations.append("not every process came back")

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Returns when it holds, or after virtual `limit_s`."""
        until = self.loop.time() + limit_s
        while not condition() and self.loop.time() < until:  # noqa: ASYNC110 - it costs no time
            await asyncio.sleep(0.5)

    async def _end(self, cluster: SimulatedCluster) -> None:
        """Every process ends by itself, workers first: nothing of it may be left in it or in Redis."""
        cluster.is_over = True
        workers, routers = cluster.workers.values(), cluster.routers.values()
        for worker in workers:
            worker.terminate()
        await self._until(lambda: all(worker.has_ended for worker in workers), 40.0)
        # A heartbeat may have come after the removal; its record expires, and routers see it.
        await asyncio.sleep(7.0)
        for router in routers:
            router.terminate(0.0)
        await self._until(lambda: all(router.has_ended for router in routers), 40.0)
        for each in (*workers, *routers):
            if not each.has_ended:
                self.report.violations.append(f"{each.name} did not end")
            # An operator's drain may last longer than its worker.
            left = [task.get_name() for task in each.process.tasks if not task.done() and task.get_name() != "drain"]
            if left:
                self.report.violations.append(f"{each.name} left tasks behind: {sorted(left)[:5]}")
        self._check_redis(cluster)

    def _check_redis(self, cluster: SimulatedCluster) -> None:
        data = cluster.redis.data
        allowed = {b"pd:workers", b"pd:workers-mark", b"pd:kv-workers", b"pd:kv-head", b"pd:kv-events", b"pd:reqs"}
        forever = sorted(key for key in data.keys if key not in data.expires and key not in allowed)
        if forever:
            self.report.violations.append(f"Redis keeps {forever[:5]} forever")
        for key in (b"pd:workers", b"pd:kv-workers"):
            if data.keys.get(key):
                self.report.violations.append(f"Redis still names workers in {key.decode()}: {data.keys[key]}")


def _replace_engine() -> None:
    """The seams: modules take the step loop, the tokenizer, the way to a peer and the socket from these names."""
    import decode_svc.service
    import pdserve.engine.stepper
    import pdserve.net.rpc
    import pdserve.worker.serve.grammars
    import pdserve.worker.serve.process
    import pdserve.worker.serve.worker

    stepper: Any = pdserve.engine.stepper
    stepper.perf_counter = STEP_CLOCK
    worker: Any = pdserve.worker.serve.worker
    worker.StepLoop = SimulatedStepLoop
    worker.warm_up = lambda model, *, max_prompt_tokens: None
    grammars: Any = pdserve.worker.serve.grammars
    grammars.read_vocabularies = lambda model_dir: vocabularies()
    process: Any = pdserve.worker.serve.process
    process.exempt_all = lambda: None
    decode: Any = decode_svc.service
    decode.bound_socket = lambda host, port, flag: tcp.FakeSocket(host, port)
    rpc: Any = pdserve.net.rpc
    rpc.open_channel = _open_channel


def _open_channel(address: str, tls: Any = None) -> Any:
    from tests.simulation.calls import Channel

    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return Channel(loop.network, address)
