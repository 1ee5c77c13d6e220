"""A formed group has reached every rank, and a rank that ended before that is noticed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pdserve.worker.load.kv_budget import KvBudget
from pdserve.worker.ranks import process_group
from pdserve.worker.ranks.process_group import RanksUnreachable, agree, form_group

CPU = torch.device("cpu")


def test_ranks_agree_on_the_smallest_budget(tmp_path: Path) -> None:
    def budget(rank: int) -> KvBudget:
        joined = form_group(tmp_path / "rendezvous", rank, 2, CPU)
        assert joined.device_bytes == 0
        return agree(joined.group, CPU, KvBudget(num_blocks=5 + rank, max_model_len=9 - rank))

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(budget, range(2))) == [KvBudget(num_blocks=5, max_model_len=8)] * 2


def test_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    """They meet through a file: torch's store, which listens, is not used. Fails with another host name for gloo."""

    def listening() -> list[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return [tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN]

    before = listening()
    with ThreadPoolExecutor() as threads:
        groups = list(threads.map(lambda rank: form_group(tmp_path / "rendezvous", rank, 2, CPU), range(2)))
    opened = [address for address in listening() if address not in before]
    assert len(groups) == 2
    assert {host for host, _ in opened} == {"127.0.0.1"}


def test_a_rank_that_ends_before_it_connects_is_noticed(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        formed = threads.submit(form_group, tmp_path / "rendezvous", 0, 2, CPU)
        # Registered in the store, and gone before it sends anything.
        process_group._gloo(c10d.FileStore(str(tmp_path / "rendezvous"), 2), 1, 2)
        with pytest.raises(RanksUnreachable, match="Rank 0 of 2 cannot reach the other ranks"):
            formed.result(timeout=30)
