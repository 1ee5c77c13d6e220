"""A request whose output is complete has ended well, whatever fails behind its last token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import PeerLost
from pdserve.v1 import decode_pb2
from router_svc.request.calls import DecodeFailed
from router_svc.request.migration.run import MigratingRun


@pytest.mark.parametrize("is_finished", [True, False])
async def test_what_fails_behind_the_last_token_harms_no_request(
    is_finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target took over, brought the last token, and was lost in its turn (seed 990002 of the simulation)."""
    worker: Any = SimpleNamespace(worker_id="d1")
    output = SimpleNamespace(is_finished=False)
    prompt: Any = SimpleNamespace(cluster=None, journal=None, placer=None, output=output)
    run = MigratingRun(prompt, SimpleNamespace(worker=worker))  # type: ignore[arg-type]

    async def supervise(*_: object) -> DecodeFailed:
        output.is_finished = is_finished
        return DecodeFailed(PeerLost("gone"), worker)

    monkeypatch.setattr(run, "_serve", lambda *_: None)
    monkeypatch.setattr(run, "_supervise", supervise)
    if is_finished:
        await run.run(decode_pb2.DecodeStart())
    else:
        with pytest.raises(DecodeFailed):
            await run.run(decode_pb2.DecodeStart())
