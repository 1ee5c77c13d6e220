"""How cores, memory and GPUs are divided among workers, and how they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.hardware import num_visible_gpus
from pdserve.cli.placement import (
    CoreShare,
    GpuShare,
    kv_bytes_per_worker,
    lend_cores,
    share_cores,
    share_gpus,
)
from pdserve.observe.machine import Cores

GIB = 1024**3


def share(ids: tuple[int, ...], prefill: int, decode: int, threads: int | None = None) -> list[CoreShare]:
    cores = Cores(ids=ids, usable=len(ids))
    return share_cores(cores, num_prefill=prefill, num_decode=decode, threads_per_worker=threads)


def pinned(*cpus: int) -> CoreShare:
    return CoreShare(threads=len(cpus), cpus=cpus)


def test_two_cores_are_split_between_the_tiers() -> None:
    assert share((0, 1), 1, 1) == [pinned(0), pinned(1)]


def test_a_single_worker_gets_all_cores() -> None:
    assert share((0, 1), 0, 1) == [pinned(0, 1)]


def test_cores_left_over_go_to_prefill() -> None:
    assert share((0, 1, 2), 1, 1) == [pinned(0, 1), pinned(2)]


def test_only_available_cores_are_assigned() -> None:
    assert share((4, 9), 1, 1) == [pinned(4), pinned(9)]


def test_more_workers_than_cores_run_unpinned() -> None:
    assert share((0, 1), 2, 1) == [CoreShare(threads=1)] * 3


def test_a_given_thread_count_is_kept_and_pinned_while_cores_last() -> None:
    assert share((0, 1, 2, 3, 4), 1, 1, threads=2) == [pinned(0, 1), pinned(2, 3)]


def test_more_threads_than_cores_are_not_pinned() -> None:
    assert share((0, 1), 1, 1, threads=2) == [CoreShare(threads=2)] * 2


def test_a_cpu_quota_bounds_the_threads_and_prevents_pinning() -> None:
    cores = Cores(ids=tuple(range(64)), usable=4)
    assert share_cores(cores, num_prefill=1, num_decode=1, threads_per_worker=None) == [CoreShare(threads=2)] * 2


@pytest.mark.parametrize("num_cores", range(1, 20))
@pytest.mark.parametrize("num_prefill", range(4))
@pytest.mark.parametrize("num_decode", range(1, 4))
def test_pinned_workers_never_overlap_and_use_every_core(num_cores: int, num_prefill: int, num_decode: int) -> None:
    shares = share(tuple(range(num_cores)), num_prefill, num_decode)
    assigned = [cpu for each in shares for cpu in each.cpus]
    assert all(each.threads >= 1 for each in shares)
    assert assigned in ([], list(range(num_cores)))
    assert bool(assigned) == (num_prefill + num_decode <= num_cores)


def test_two_workers_lend_their_cores_to_each_other() -> None:
    assert lend_cores([pinned(0, 1), pinned(2)]) == [
        CoreShare(threads=2, cpus=(0, 1), borrow_cpus=(2,)),
        CoreShare(threads=1, cpus=(2,), borrow_cpus=(0, 1)),
    ]


def test_borrowers_try_different_cores_first() -> None:
    assert [share.borrow_cpus for share in lend_cores([pinned(3), pinned(4, 5), pinned(6)])] == [
        (4, 5, 6),
        (6, 3),
        (3, 4, 5),
    ]


@pytest.mark.parametrize("shares", [[pinned(0, 1)], [CoreShare(threads=2)] * 2])
def test_a_single_worker_and_unpinned_workers_borrow_nothing(shares: list[CoreShare]) -> None:
    assert lend_cores(shares) == shares


def test_the_kv_cache_is_a_fifth_of_the_memory_over_all_workers() -> None:
    assert kv_bytes_per_worker(10 * GIB, 2) == GIB
    assert kv_bytes_per_worker(10 * GIB, 4) == GIB // 2


def test_the_kv_cache_has_a_ceiling_and_a_floor() -> None:
    assert kv_bytes_per_worker(1000 * GIB, 2) == 2 * GIB
    assert kv_bytes_per_worker(1, 2) == 1024**2


def test_gpus_are_assigned_round_robin_and_their_memory_is_shared() -> None:
    assert share_gpus(2, num_ranks=[1, 1, 1], utilization=0.9) == [
        GpuShare(device="cuda:0", memory=0.45),
        GpuShare(device="cuda:1", memory=0.9),
        GpuShare(device="cuda:0", memory=0.45),
    ]
    assert [share.memory for share in share_gpus(1, num_ranks=[1] * 4, utilization=0.9)] == [0.22] * 4


def test_ranks_of_a_worker_use_neighbouring_gpus() -> None:
    assert share_gpus(4, num_ranks=[1, 2, 2], utilization=0.9) == [
        GpuShare(device="cuda:0", memory=0.45),
        GpuShare(device="cuda:1", memory=0.45, num_ranks=2),
        # Only one GPU is left, which is too few.
        GpuShare(device="cuda:0", memory=0.45, num_ranks=2),
    ]
    assert [str(share) for share in share_gpus(8, num_ranks=[4, 1], utilization=0.9)] == [
        "90% of cuda:0 and the next 3",
        "90% of cuda:4",
    ]
    with pytest.raises(SetupError, match="--tensor-parallel-size 4 needs 4 GPUs, but this machine has 2"):
        share_gpus(2, num_ranks=[1, 4], utilization=0.9)


def test_only_visible_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for address in ("0000:18:00.0", "0000:2a:00.0"):
        (tmp_path / address).mkdir()
    assert num_visible_gpus(tmp_path) == 2
    assert num_visible_gpus(tmp_path / "absent") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,")
    assert num_visible_gpus(tmp_path) == 2
