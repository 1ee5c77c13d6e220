"""Which decode workers have too many sequences."""

from __future__ import annotations

import pytest

from pdserve.cli.rebalance import sequences_too_many
from pdserve.cli.status import WorkerStatus


def worker(name: str, running: int, *, ready: bool = True) -> WorkerStatus:
    return WorkerStatus(
        worker_id=name,
        tier=name.partition("-")[0],
        ready=ready,
        epoch=1,
        grpc_address="127.0.0.1:1",
        http_address="127.0.0.1:2",
        max_num_seqs=64,
        total_blocks=10,
        free_blocks=10,
        running=running,
        waiting=0,
        queued_tokens=0,
    )


@pytest.mark.parametrize(
    ("running", "too_many"),
    [
        ([8, 0], {"decode-0": 4}),
        ([5, 4], {}),
        ([1, 0], {}),
        ([9, 1, 2], {"decode-0": 5}),
        ([6, 6, 0], {"decode-0": 2, "decode-1": 2}),
        ([3], {}),
        ([], {}),
    ],
)
def test_what_is_beyond_an_equal_share_should_leave(running: list[int], too_many: dict[str, int]) -> None:
    workers = [worker(f"decode-{index}", count) for index, count in enumerate(running)]
    assert sequences_too_many([worker("prefill-0", 30), *workers]) == too_many


def test_a_worker_that_is_not_ready_gets_nothing() -> None:
    assert sequences_too_many([worker("decode-0", 6), worker("decode-1", 0, ready=False)]) == {}
