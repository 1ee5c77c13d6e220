"""Keep-alives that a prefill worker writes while the decode worker verifies a transfer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received
from kvtransfer.handover.ticket import Commit
from prefill_svc.session import PrefillSession
from tests.integration.services.local_cluster import running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(9)]
_REQUESTS = 5


async def test_a_commit_that_is_answered_while_a_keep_alive_is_written_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is cut off on its way makes grpc refuse the next one, and the prompt would fail unexpectedly."""
    written = asyncio.Event()
    keep_alive, commit = PrefillSession._keep_alive, Receiver.commit

    async def noted(session: PrefillSession) -> None:
        written.set()
        await keep_alive(session)

    async def late(receiver: Receiver, message: Commit) -> Received:
        written.clear()
        await written.wait()
        return await commit(receiver, message)

    monkeypatch.setattr("prefill_svc.session.KEEP_ALIVE_S", 0.0)
    monkeypatch.setattr(PrefillSession, "_keep_alive", noted)
    monkeypatch.setattr(Receiver, "commit", late)
    async with running_cluster(save_model(tmp_path)) as cluster:
        reference = await cluster.local(PROMPT)
        for _ in range(_REQUESTS):
            request = cluster.request(PROMPT)
            await request.start()
            await request.prefill(await request.ticket())
            assert await request.finish() == reference
        await cluster.all_free()
