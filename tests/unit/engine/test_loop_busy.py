"""The step thread reports when it becomes busy and idle."""

from __future__ import annotations

from queue import SimpleQueue

from pdserve.engine.loop import LoopConfig
from tests.unit.engine.test_loop import WAIT_S, Broken, Held, rig


class BusyChanges:
    """Records whether the loop has work, and lets a test wait for the next change."""

    def __init__(self) -> None:
        self._changes: SimpleQueue[bool] = SimpleQueue()

    def __call__(self, busy: bool) -> None:
        self._changes.put(busy)

    def next(self) -> bool:
        return self._changes.get(timeout=WAIT_S)

    def rest(self) -> list[bool]:
        return [self._changes.get() for _ in range(self._changes.qsize())]


def test_a_loop_is_busy_without_a_break_from_its_first_call_to_its_last_step() -> None:
    changes, decoder = BusyChanges(), Held()
    with rig(decoder, LoopConfig(on_busy=changes)) as it:
        assert changes.next() is False  # Nothing to do yet.
        it.submit([1, 2, 3])
        assert decoder.entered.wait(WAIT_S)
        assert changes.rest() == [True]
        decoder.gate.set()
        it.tokens()
        assert changes.next() is False
        assert changes.rest() == []


def test_a_call_finds_the_loop_busy() -> None:
    changes = BusyChanges()
    with rig(config=LoopConfig(on_busy=changes)) as it:
        assert changes.next() is False
        assert it.loop.call(changes.rest).result(WAIT_S) == [True]


def test_a_stopped_loop_is_idle() -> None:
    changes = BusyChanges()
    with rig(config=LoopConfig(on_busy=changes)):
        pass
    assert changes.rest()[-1] is False


def test_a_failed_loop_is_idle() -> None:
    changes = BusyChanges()
    with rig(Broken(), LoopConfig(on_busy=changes)) as it:
        it.submit([1, 2, 3])
        it.fatal.get(timeout=WAIT_S)
        it.loop.stop()
        assert changes.rest()[-1] is False


def test_a_loop_is_awake_while_it_computes_and_asleep_afterwards() -> None:
    changes, decoder = BusyChanges(), Held()
    with rig(decoder, LoopConfig(on_busy=changes)) as it:
        assert changes.next() is False
        assert not it.loop.is_awake
        it.submit([1, 2, 3])
        assert decoder.entered.wait(WAIT_S)
        assert it.loop.is_awake
        assert changes.next() is True
        decoder.gate.set()
        assert changes.next() is False
        assert not it.loop.is_awake
