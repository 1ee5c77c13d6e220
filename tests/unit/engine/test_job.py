"""Requests queue in order of arrival at their first worker."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import RequestId
from pdserve.engine.job import queue_by_arrival
from prefill_svc.request import ScheduledPrompt
from tests.unit.prefill_svc.prefill_worker import job


@given(arrivals=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), max_size=12))
def test_a_queue_is_in_order_of_arrival_and_of_coming_among_equals(arrivals: list[float]) -> None:
    queue: dict[RequestId, ScheduledPrompt] = {}
    for number, arrived_at in enumerate(arrivals):
        prompt = replace(job(RequestId(f"r{number}"), [1]), arrived_at=arrived_at)
        queue_by_arrival(queue, ScheduledPrompt(job=prompt, sequence=prompt.new_sequence(), num_cached=0))
    expected = sorted(range(len(arrivals)), key=lambda number: arrivals[number])
    assert list(queue) == [f"r{number}" for number in expected]
