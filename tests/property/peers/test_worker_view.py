"""A router's view of the workers, across any sequence of reads, outages and deaths."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.peers.workers import Sighting, WorkerRecord, WorkerView
from tests.support.records import worker_record

IDS = ["a", "b", "c"]
GRACE_S = 5.0


class ViewMachine(RuleBasedStateMachine):
    """The true registry, and a view that reads it unless there is an outage."""

    def __init__(self) -> None:
        super().__init__()
        self.view = WorkerView(grace_s=GRACE_S)
        self.now = 0.0
        self.registry: dict[str, Sighting] = {}
        self.read: dict[str, WorkerRecord] = {}
        self.outage = False
        self.readable_since: float | None = None

    @rule(seconds=st.sampled_from([0.1, 1.0, GRACE_S, GRACE_S + 1]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(worker_id=st.sampled_from(IDS), epoch=st.integers(1, 3), ready=st.booleans())
    def heartbeat(self, worker_id: str, epoch: int, ready: bool) -> None:
        before = self.registry.get(worker_id)
        beat = before.beat + 1 if before is not None and before.record.epoch == epoch else 1
        self.registry[worker_id] = Sighting(record=worker_record(worker_id, epoch=epoch, ready=ready), beat=beat)

    @rule(worker_id=st.sampled_from(IDS))
    def expire(self, worker_id: str) -> None:
        self.registry.pop(worker_id, None)

    @rule()
    def registry_loses_all(self) -> None:
        self.registry.clear()
        self.view.registry_lost(now=self.now)
        self.outage = True

    @rule()
    def read_registry(self) -> None:
        before = [self.view.get(record.worker_id) for record in self.read.values()]
        if self.outage:
            self.outage, self.readable_since = False, self.now
        within_grace = self.readable_since is not None and self.now < self.readable_since + GRACE_S
        self.view.apply(self.registry.values(), read_at=self.now)
        records = {worker_id: sighting.record for worker_id, sighting in self.registry.items()}
        self.read = {**self.read, **records} if within_grace else records
        if within_grace:
            for record in before:
                assert record is None or self.view.get(record.worker_id) is not None, "forgotten too early"

    @rule(worker_id=st.sampled_from(IDS))
    def dies(self, worker_id: str) -> None:
        record = self.view.get(worker_record(worker_id).worker_id)
        if record is not None:
            assert self.view.mark_lost(record.worker_id, record.epoch, now=self.now)
            assert not self.view.mark_lost(record.worker_id, record.epoch, now=self.now)
            assert self.view.get(record.worker_id) is None

    @invariant()
    def only_workers_of_the_newest_read_are_shown(self) -> None:
        for record in self.view.workers_of("decode"):
            assert self.read[record.worker_id] == record
            assert self.view.get(record.worker_id) == record

    @invariant()
    def degraded_from_the_loss_to_the_next_reading(self) -> None:
        assert self.view.degraded == self.outage

    @invariant()
    def tiers_are_separate(self) -> None:
        assert self.view.workers_of("prefill") == []


TestWorkerView = ViewMachine.TestCase
TestWorkerView.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
