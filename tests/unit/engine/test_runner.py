"""What a runner records besides the steps that it runs."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import RecordNext, Runner
from pdserve.engine.sampler import Sampler
from tests.unit.engine.fakes import CPU, FakeDecoder, layout


def runner(record_next: RecordNext | None) -> Runner:
    return Runner(FakeDecoder(), KvCache(layout(), 4, CPU), Sampler(), record_next=record_next)


def test_without_graphs_there_is_nothing_to_prepare() -> None:
    assert not runner(None).prepare(is_idle=False)
    assert not runner(None).prepare(is_idle=True)


def test_what_is_recorded_at_the_start_comes_first_and_that_is_the_end_of_it() -> None:
    left, calls = {False: 1, True: 2}, list[bool]()

    def record_next(is_idle: bool) -> bool:
        calls.append(is_idle)
        left[is_idle] -= 1
        return left[is_idle] >= 0

    it = runner(record_next)
    assert [it.prepare(is_idle=is_idle) for is_idle in (True, False, True, False)] == [False, True, False, False]
    assert [it.prepare(is_idle=True) for _ in range(5)] == [True, True, False, False, False]
    assert calls == [False, False, True, True, True]


def test_without_memory_for_a_graph_no_more_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    calls = list[bool]()

    def record_next(is_idle: bool) -> bool:
        calls.append(is_idle)
        if is_idle:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return False

    it = runner(record_next)
    assert not it.prepare(is_idle=True)
    assert not calls
    it.prepare(is_idle=False)
    for _ in range(2):
        assert not it.prepare(is_idle=True)
    assert calls == [False, True]
    assert [record.getMessage() for record in caplog.records] == ["graphs_incomplete"]
