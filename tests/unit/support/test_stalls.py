"""What the machine did while a test ran."""

from __future__ import annotations

import pytest

from tests.support.stalls import MachineWatch, Meanwhile, processor, watching


def test_a_thread_that_wakes_up_late_stood_still() -> None:
    watch = MachineWatch()
    watch.sample(100.0, 100.1)
    watch.sample(100.1, 103.2)
    watch.sample(103.2, 103.5)
    [stall] = watch.stalls
    assert (stall.started_at, stall.ended_at) == pytest.approx((100.2, 103.2))


def test_only_what_overlaps_with_a_test_counts() -> None:
    watch = MachineWatch()
    watch.sample(100.0, 103.1)
    watch.sample(200.0, 201.1)
    watch.pressure = [(0.0, 0.0), (100.0, 50.0), (200.0, 60.0), (300.0, 160.0)]
    assert watch.between(102.1, 250.0) == Meanwhile(pytest.approx(1.0), pytest.approx(2.0), pytest.approx(0.55))
    assert watch.between(104.0, 105.0) == Meanwhile(0.0, 0, pytest.approx(0.1))


def test_without_a_count_of_the_kernel_the_pressure_is_unknown() -> None:
    assert "unknown" in str(MachineWatch().between(1.0, 2.0))
    assert str(Meanwhile(2.0, 3.0, 0.5)) == "stalls 3.0 s (longest 2.0 s), CPU pressure 50%"


def test_the_watch_ends_with_its_block() -> None:
    with watching() as watch:
        pass
    assert watch.stalls == []


def test_the_processor_is_named_with_the_number_of_cores() -> None:
    assert processor().endswith("cores")
