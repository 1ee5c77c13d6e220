"""Keep-alives on the streams of a decode worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from decode_svc.service import DecodeService
from pdserve.base.ids import RequestId
from pdserve.base.tasks import service_group
from pdserve.engine.step import PrefillProgress, StepEvents
from pdserve.v1 import common_pb2
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.inboxes import Inboxes
from pdserve.worker.serve.worker import KEEP_ALIVE_S


class Stream:
    """Records when it was to be kept alive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def keep_alive(self, message: pb.DecodeResponse) -> None:
        assert message == pb.DecodeResponse(keep_alive=common_pb2.KeepAlive())
        self.times.append(asyncio.get_running_loop().time())


@pytest.mark.virtual_time
async def test_keep_alives_come_as_announced_and_end_with_the_progress_of_the_step_loop() -> None:
    service: Any = object.__new__(DecodeService)
    stream, worker = Stream(), SimpleNamespace(is_hung=False)
    service._streams, service._worker = {stream}, worker
    async with service_group() as tasks:
        tasks.start(service._keep_alive(), name="keep-alives")
        await asyncio.sleep(10.1)
        gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
        # A message that was sent just after one look suppresses the keep-alive of the next.
        assert gaps
        assert 2 * max(gaps) <= KEEP_ALIVE_S * 1.001
        worker.is_hung = True
        before = len(stream.times)
        await asyncio.sleep(10)
        assert len(stream.times) == before
        worker.is_hung = False
        await asyncio.sleep(1)
        assert len(stream.times) > before


async def test_the_progress_of_a_local_prefill_reaches_its_session() -> None:
    service: Any = object.__new__(DecodeService)
    ignored = SimpleNamespace(after_step=lambda output: None)
    service._inboxes, service._eviction, service._peers = Inboxes(), ignored, SimpleNamespace(replication=ignored)
    progress = PrefillProgress(request_id=RequestId("a"), attempt=1, num_computed=64, num_prompt=4096, num_cached=0)
    async with service._inboxes.open(RequestId("a"), 1) as inbox:
        durations = SimpleNamespace(total_s=0.0)
        service.on_step(SimpleNamespace(events=StepEvents(tier="decode", progress=(progress,)), durations=durations))
        assert await inbox.next() == progress
