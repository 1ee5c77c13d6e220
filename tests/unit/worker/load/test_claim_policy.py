"""Shares, neighbours and borrowed cores of a worker that claims its cores."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import SetupError
from pdserve.observe.machine import Cores
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.claim_policy import choose_cores, choose_gpus, num_to_claim, require_claimable, with_cores


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model="", redis_url="", **settings)


def cores(*ids: int) -> Cores:
    return Cores(ids=ids, usable=len(ids))


@given(num_cores=st.integers(1, 300), workers=st.integers(1, 40))
def test_every_expected_worker_finds_its_share_in_any_order_of_arrival(num_cores: int, workers: int) -> None:
    machine = cores(*range(num_cores))
    free = set(machine.ids)
    shares = []
    for _ in range(workers):
        own = choose_cores(free, machine.ids, num_to_claim(config(claim_workers=workers), machine))
        free -= set(own)
        shares.append(len(own))
    assert shares == [max(1, num_cores // workers)] * min(workers, num_cores) + [0] * max(0, workers - num_cores)


def test_threads_are_the_share_of_a_worker_that_names_them() -> None:
    assert num_to_claim(config(threads=3), cores(*range(16))) == 3


def test_neighbours_are_preferred_and_gaps_are_used_when_there_are_none() -> None:
    machine = (0, 1, 2, 3, 4, 5)
    assert choose_cores({0, 2, 3, 5}, machine, 2) == (2, 3)
    assert choose_cores({0, 2, 5}, machine, 2) == (0, 2)
    assert choose_cores({5}, machine, 2) == (5,)
    assert choose_cores(set(), machine, 2) == ()


def test_a_worker_borrows_all_cores_of_the_others_the_following_ones_first() -> None:
    claimed = with_cores(config(), (2, 3), cores(0, 2, 3, 7), "leases")
    assert (claimed.cpus, claimed.threads, claimed.borrow_cpus, claimed.core_leases) == ((2, 3), 2, (7, 0), "leases")


def test_a_worker_too_many_runs_on_all_cores_with_the_share_of_one_more() -> None:
    claimed = with_cores(config(claim_workers=3), (), cores(*range(8)), "leases")
    assert (claimed.cpus, claimed.threads, claimed.borrow_cpus, claimed.core_leases) == ((), 2, (), None)
    assert with_cores(config(), (), cores(0, 1), "leases").threads == 1


def test_ranks_divide_claimed_cores_and_lend_none() -> None:
    claimed = with_cores(config(tensor_parallel_size=2), (0, 1), cores(0, 1, 2), "leases")
    assert (claimed.cpus, claimed.borrow_cpus, claimed.core_leases) == ((0, 1), (), None)


def test_gpus_of_a_worker_are_neighbours() -> None:
    assert choose_gpus({1, 3, 4}, 1) == range(1, 2)
    assert choose_gpus({1, 3, 4}, 2) == range(3, 5)
    assert choose_gpus({1, 3}, 2) is None
    assert choose_gpus(set(), 1) is None


@pytest.mark.parametrize("settings", [{"core_leases": "file"}, {"borrow_cpus": (1,)}])
def test_settings_that_a_claim_chooses_are_refused_next_to_it(settings: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"both are set\. Leave --"):
        require_claimable(config(claim_dir="dir", **settings))
