"""An attempt that is cancelled twice, as when its peer is lost and its router leaves, ends with the step that it is in.

Otherwise what that step reports would come to the next attempt of the request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decode_svc.scheduler import DecodeScheduler
from decode_svc.session import DecodeSession
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.session import PrefillSession
from tests.integration.services.local_cluster import ALWAYS_LOCAL, DEADLINE_S, running_cluster
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
#: Turns of the event loop in which a task that waits for nothing would end.
_TURNS = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


class FirstStep:
    """A scheduler's first step, held before it is reported, and the task of the session that it is for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheduler: type[Any], session: type[Any]) -> None:
        self.task: asyncio.Task[Any] | None = None
        self._is_in, self._may_go = asyncio.Event(), threading.Event()
        loop, update, run = asyncio.get_running_loop(), scheduler.update, session.run

        def held(*arguments: Any) -> Any:
            if not self._may_go.is_set():
                loop.call_soon_threadsafe(self._is_in.set)
                assert self._may_go.wait(DEADLINE_S)
            return update(*arguments)

        async def noted(*arguments: Any) -> Any:
            self.task = self.task or asyncio.current_task()
            return await run(*arguments)

        monkeypatch.setattr(scheduler, "update", held)
        monkeypatch.setattr(session, "run", noted)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Lets the step go at the end of the block."""
        try:
            yield
        finally:
            self._may_go.set()

    async def cancel_twice(self) -> None:
        """Cancels the session's task during the step, and checks that it waits for the step's end."""
        await self._is_in.wait()
        assert self.task is not None
        for _ in range(2):
            self.task.cancel()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        assert not self.task.done()


async def test_a_prompt_that_is_cancelled_twice_ends_with_its_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(model) as cluster:
        step = FirstStep(monkeypatch, PrefillScheduler, PrefillSession)
        request = cluster.request(PROMPT)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket()))
        with step.entered():
            await step.cancel_twice()
        prefill.cancel()
        request.cancel()
        await cluster.all_free()


async def test_a_request_that_is_cancelled_twice_ends_with_its_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(model) as cluster:
        step = FirstStep(monkeypatch, DecodeScheduler, DecodeSession)
        request = cluster.request(PROMPT)
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        with step.entered():
            await step.cancel_twice()
        request.cancel()
        await cluster.all_free()
