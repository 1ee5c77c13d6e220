"""`pdserve drain` finds its worker by id or address, and spares the last one of a tier."""

from __future__ import annotations

import pytest

from pdserve.base.errors import NotFound, RequestError
from pdserve.cli.__main__ import main
from pdserve.cli.drain import find_worker, require_another
from pdserve.cli.status import WorkerStatus


def worker(worker_id: str, tier: str = "decode", *, ready: bool = True, port: int = 1) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id,
        tier=tier,
        ready=ready,
        epoch=1,
        grpc_address=f"h:{port}",
        http_address=f"h:{port + 1}",
        max_num_seqs=4,
        total_blocks=8,
        free_blocks=8,
        running=0,
        waiting=0,
        queued_tokens=0,
    )


def test_a_worker_is_found_by_its_id_and_by_its_addresses() -> None:
    workers = [worker("decode-0", port=10), worker("decode-1", port=20)]
    assert [find_worker(workers, name).worker_id for name in ("decode-0", "h:20", "h:21")] == [
        "decode-0",
        "decode-1",
        "decode-1",
    ]
    with pytest.raises(NotFound, match="Workers: decode-0, decode-1"):
        find_worker(workers, "decode-2")


def test_the_last_ready_worker_of_a_tier_is_not_drained() -> None:
    first, second, other = worker("decode-0"), worker("decode-1", ready=False), worker("prefill-0", "prefill")
    with pytest.raises(RequestError, match="last ready decode worker"):
        require_another([first, second, other], first)
    # It is drained already, or starts: nothing is lost.
    require_another([first, second, other], second)


def test_a_command_without_a_worker_says_what_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain"]) == 1
    assert "pdserve drain WORKER" in capsys.readouterr().err
