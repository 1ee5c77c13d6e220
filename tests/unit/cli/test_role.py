"""`pdserve role` says what to pass, and leaves the last decode worker in its tier."""

from __future__ import annotations

import pytest

from pdserve.base.errors import RequestError
from pdserve.cli.__main__ import main
from pdserve.cli.role import require_decode_worker
from tests.unit.cli.test_drain import worker


def test_the_last_ready_decode_worker_keeps_its_role() -> None:
    first, second, prefill = worker("decode-0"), worker("decode-1", ready=False), worker("prefill-0", "prefill")
    with pytest.raises(RequestError, match="last ready decode worker"):
        require_decode_worker([first, second, prefill], first, "prefill")
    require_decode_worker([first, worker("decode-1"), prefill], first, "prefill")
    # It has the role already: nothing changes.
    require_decode_worker([first, second, prefill], first, "decode")


def test_the_last_prefill_worker_may_go_since_decode_workers_prefill() -> None:
    prefill = worker("prefill-0", "prefill")
    require_decode_worker([worker("decode-0"), prefill], prefill, "decode")


@pytest.mark.parametrize("arguments", [(), ("decode-0",), ("decode-0", "router")])
def test_a_command_without_a_worker_or_a_tier_says_what_to_pass(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["role", *arguments]) == 1
    assert "pdserve role WORKER decode" in capsys.readouterr().err
