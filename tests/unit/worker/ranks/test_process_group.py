"""Ranks have met when their group is formed, and one that ended before is found then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pdserve.worker.load.kv_budget import KvBudget
from pdserve.worker.ranks import process_group as groups
from pdserve.worker.ranks.process_group import RanksUnreachable, agree, form_group

CPU = torch.device("cpu")


def test_ranks_that_have_met_agree_on_what_is_possible_for_all(tmp_path: Path) -> None:
    def budget(rank: int) -> KvBudget:
        joined = form_group(tmp_path / "here", rank, 2, CPU)
        assert joined.device_bytes == 0
        return agree(joined.group, CPU, KvBudget(num_blocks=5 + rank, max_model_len=9 - rank))

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(budget, range(2))) == [KvBudget(num_blocks=5, max_model_len=8)] * 2


def test_a_rank_that_has_ended_before_it_met_anyone_is_found(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        formed = threads.submit(form_group, tmp_path / "here", 0, 2, CPU)
        # Known to the others, and gone before it says anything.
        groups._gloo(c10d.FileStore(str(tmp_path / "here"), 2), 1, 2)
        with pytest.raises(RanksUnreachable, match="Rank 0 of 2 does not reach the others"):
            formed.result(timeout=30)
