"""Whatever is lost on the way, the blocks a worker published end up equal to those it holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.index.kv_events import Outbox
from kvtransfer.index.kv_log import MAX_BATCH, KvEventBatch
from pdserve.base.ids import BlockHash
from tests.support.records import block_hashes

HASHES = block_hashes(2 * MAX_BATCH + 7)

few = st.lists(st.sampled_from(HASHES[:10]), max_size=6)


class OutboxStory(RuleBasedStateMachine):
    """An outbox, the blocks its worker holds, and those the other side knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox()
        self.held: set[BlockHash] = set()
        self.published: set[BlockHash] | None = None  # None: nothing usable

    @rule(added=few, removed=few)
    def change(self, added: list[BlockHash], removed: list[BlockHash]) -> None:
        self.outbox.record(added, removed)
        self.held = (self.held - set(removed)) | set(added)

    @rule()
    def fill(self) -> None:
        self.outbox.record(HASHES, [])
        self.held = set(HASHES)

    @rule(max_batches=st.integers(1, 3))
    def send(self, max_batches: int) -> None:
        for batch in self.outbox.take(max_batches):
            self.receive(batch)

    @rule(max_batches=st.integers(1, 3), arrived=st.integers(0, 3), forgot=st.booleans())
    def send_with_losses(self, max_batches: int, arrived: int, forgot: bool) -> None:
        """Some of it arrived, and the sender does not know how much."""
        for batch in self.outbox.take(max_batches)[:arrived]:
            self.receive(batch)
        if forgot:
            self.published = None
        self.outbox.start_over()

    def receive(self, batch: KvEventBatch) -> None:
        assert len(batch.added) + len(batch.removed) <= MAX_BATCH
        assert not set(batch.added) & set(batch.removed)
        if batch.reset:
            self.published = set()
            assert not batch.removed
        assert self.published is not None, "the first batch after a loss must be a reset"
        assert not set(batch.added) & self.published, "published twice"
        assert set(batch.removed) <= self.published, "removed a block that was not published"
        self.published = (self.published | set(batch.added)) - set(batch.removed)

    @invariant()
    def the_outbox_knows_what_is_held(self) -> None:
        assert self.outbox.held == self.held

    @invariant()
    def pending_changes_are_bounded(self) -> None:
        assert self.outbox.pending <= len(self.held) + len(self.published or ())

    def teardown(self) -> None:
        for batch in self.outbox.take(100):
            self.receive(batch)
        assert not self.outbox.due
        assert self.published == self.held


TestOutbox = OutboxStory.TestCase
TestOutbox.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
