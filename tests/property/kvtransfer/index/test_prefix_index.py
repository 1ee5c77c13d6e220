"""The prefix index gives the same answers as a model too simple to be wrong."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.index.prefix_index import KvEvent, KvEventKind, PrefixIndex
from pdserve.base.ids import BlockHash, Epoch, WorkerId
from tests.support.records import block_hashes

HASHES = block_hashes(12)
WORKERS = [WorkerId(f"worker-{number}") for number in range(4)]

some_hashes = st.lists(st.sampled_from(HASHES), unique=True).map(tuple)


@st.composite
def events(draw: st.DrawFn) -> KvEvent:
    added = draw(some_hashes)
    removed = tuple(block_hash for block_hash in draw(some_hashes) if block_hash not in added)
    return KvEvent(
        worker_id=draw(st.sampled_from(WORKERS)),
        epoch=Epoch(draw(st.integers(1, 3))),
        kind=draw(st.sampled_from(list(KvEventKind))),
        added=added,
        removed=removed,
    )


class NaiveIndex:
    """The same interface, with a set for each worker."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, tuple[Epoch, set[BlockHash]]] = {}

    def apply(self, event: KvEvent) -> None:
        if event.kind is KvEventKind.RESET:
            self.held[event.worker_id] = (event.epoch, set(event.added))
            return
        epoch, hashes = self.held.get(event.worker_id, (None, set()))
        if epoch != event.epoch:
            return
        if event.kind is KvEventKind.GONE:
            del self.held[event.worker_id]
        else:
            hashes -= set(event.removed)
            hashes |= set(event.added)

    def overlap(self, prompt: list[BlockHash]) -> dict[WorkerId, int]:
        leading = {}
        for worker_id, (_, hashes) in self.held.items():
            count = next((held for held, block in enumerate(prompt) if block not in hashes), len(prompt))
            if count:
                leading[worker_id] = count
        return leading


def assert_same(index: PrefixIndex, model: NaiveIndex) -> None:
    assert index.epochs() == {worker_id: epoch for worker_id, (epoch, _) in model.held.items()}
    for worker_id in WORKERS:
        _, hashes = model.held.get(worker_id, (None, set()))
        assert index.blocks_of(worker_id) == hashes
    assert index.entries == sum(len(hashes) for _, hashes in model.held.values())
    assert index.num_blocks == len(set().union(*(hashes for _, hashes in model.held.values())))


@settings(deadline=None)
@given(st.lists(events(), max_size=40), st.lists(st.sampled_from(HASHES), max_size=12))
def test_the_index_equals_a_set_per_worker(history: list[KvEvent], prompt: list[BlockHash]) -> None:
    index, model = PrefixIndex(), NaiveIndex()
    for event in history:
        index.apply(event)
        model.apply(event)
        assert index.overlap(prompt) == model.overlap(prompt)
    assert_same(index, model)


@settings(deadline=None)
@given(st.lists(events(), max_size=30), st.data())
def test_replaying_the_end_of_a_hihistory_changes_nothing(history: list[KvEvent], data: st.DataObject) -> None:
    """A mirror does this after a snapshot: it applies events that the snapshot already includes."""
    index, model = PrefixIndex(), NaiveIndex()
    for event in history:
        index.apply(event)
        model.apply(event)
    for event in history[data.draw(st.integers(0, len(history)), label="replayed from") :]:
        index.apply(event)
    assert_same(index, model)


@settings(deadline=None)
@given(st.lists(events(), max_size=30), st.integers(0, 8))
def test_a_full_index_stays_bounded_and_never_claims_what_is_not_held(history: list[KvEvent], bound: int) -> None:
    index, model = PrefixIndex(max_entries=bound), NaiveIndex()
    for event in history:
        index.apply(event)
        model.apply(event)
        assert index.entries <= bound
        for worker_id in WORKERS:
            _, hashes = model.held.get(worker_id, (None, set()))
            assert index.blocks_of(worker_id) <= hashes


@settings(deadline=None)
@given(st.lists(events(), max_size=30))
def test_forgetting_every_worker_leaves_nothing(history: list[KvEvent]) -> None:
    index = PrefixIndex()
    for event in history:
        index.apply(event)
    for worker_id, epoch in index.epochs().items():
        index.forget(worker_id, Epoch(epoch + 1))
        assert worker_id in index.epochs(), "another incarnation was forgotten"
        index.forget(worker_id, epoch)
    assert (index.entries, index.num_blocks, index.epochs()) == (0, 0, {})
