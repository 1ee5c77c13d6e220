"""Real preemption: a sequence that waits for blocks keeps its stream alive, and gives the same tokens as without."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from decode_svc import service
from decode_svc.scheduler import DecodeScheduler
from pdserve.v1 import decode_pb2
from tests.integration.services.local_cluster import ALWAYS_LOCAL, DEADLINE_S, RouterRequest, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(20)]
KEEP_ALIVE_S = 0.02


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


class SlowSteps:
    """Holds each step, once a sequence is preempted, until the preempted request has heard of the worker again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard = threading.Semaphore(0)
        self.held = 0
        #: Why the preempted request may leave.
        self.leave_reasons: set[str] = set()
        update = DecodeScheduler.update

        def held(scheduler: DecodeScheduler, *arguments: Any) -> Any:
            if scheduler.load().num_preemptions and self.held < 20:
                self.held += 1
                assert self.heard.acquire(timeout=DEADLINE_S), "the preempted request hears nothing"
            return update(scheduler, *arguments)

        monkeypatch.setattr(DecodeScheduler, "update", held)


async def _finish(request: RouterRequest, steps: SlowSteps) -> dict[int, list[int]]:
    """All tokens. Each keep-alive lets the worker compute one more step."""
    ended = False
    assert request._stream is not None
    while not ended:
        event = await request._stream.read(DEADLINE_S)
        assert isinstance(event, decode_pb2.DecodeResponse)
        assert not event.HasField("failed"), event
        if event.HasField("keep_alive"):
            steps.heard.release()
        if event.HasField("leave"):
            steps.leave_reasons.add(event.leave.reason)
        for choice in event.tokens.choices:
            request.take(choice)
        ended = event.HasField("ended")
    request.cancel()
    return request.tokens


async def test_a_preempted_sequence_hears_from_its_worker_and_ends_with_the_same_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if keep-alives go to running sequences alone: the worker would wait for a word that never comes."""
    monkeypatch.setattr(service, "KEEP_ALIVE_S", KEEP_ALIVE_S)
    async with running_cluster(model) as cluster:
        blocks = cluster.decode.model.pool.num_blocks
        # Either request fits into the pool alone, and both together do not.
        tokens = 4 * blocks * 3 // 4 - len(PROMPT)
        expected = [await cluster.local(prompt, max_tokens=tokens) for prompt in (PROMPT, [5, *PROMPT])]
        steps = SlowSteps(monkeypatch)
        first = cluster.request(PROMPT, max_tokens=tokens)
        second = cluster.request([5, *PROMPT], max_tokens=tokens)
        for request in (first, second):
            await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        found = await asyncio.gather(first.finish(), _finish(second, steps))
        assert steps.held == 20
        assert steps.leave_reasons == {"full"}
        assert list(found) == expected
        await cluster.all_free()
