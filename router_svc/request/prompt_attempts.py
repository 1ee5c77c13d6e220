"""Calls to prefill workers for prompts without output, one after the other until one of them succeeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

from pdserve.base.errors import Draining, NoWorkers, PdserveError, RequestError
from pdserve.v1 import prefill_pb2
from router_svc.records.events import Retried, WorkerChosen
from router_svc.request.calls import prefill_call
from router_svc.request.running_prompt import RunningPrompt
from router_svc.routing.incarnation import Incarnation, incarnation_of
from router_svc.routing.placement import Placement

#: Waits for the next change of the workers. It takes the number of waits so far.
Heartbeat = Callable[[int], Awaitable[None]]
Result = TypeVar("Result")


class PromptAttempts(ABC, Generic[Result]):
    """What a prefill worker reports of one prompt. If the worker fails, another one starts from the first token."""

    #: The `SAMPLING_VERSION` that a worker needs at least.
    version: int
    #: The error for a cluster without such workers.
    no_workers: str

    def __init__(self, prompt: RunningPrompt, heartbeat: Heartbeat) -> None:
        self._prompt = prompt
        self._heartbeat = heartbeat
        #: A worker was ready, or expected, since the request came.
        self._was_expected = False
        self._num_prompt = len(prompt.generation.prompt)
        #: Workers that shut down, as they have said.
        self._draining: set[Incarnation] = set()

    @abstractmethod
    async def _attempt(self, placement: Placement) -> Result:
        """The result of one worker. Raises what it reports, `PeerLost`, or `TransferTimeout` when it is silent."""

    async def _result(self) -> Result:
        """The result of the first worker that has one. Raises the error for the client."""
        while True:
            placement = await self._placement()
            try:
                return await self._attempt(placement)
            except RequestError:
                raise
            except PdserveError as error:
                await self._failed(placement, error)

    async def _events(
        self, placement: Placement, request: prefill_pb2.PrefillRequest, *, scores: bool
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """The events of a call, in which progress is noted. Close it when its loop is left early."""
        prompt, worker = self._prompt, placement.worker
        trace = prompt.journal.append(WorkerChosen.of(placement, scores=scores, remark=prompt.placer.deaths.remark))
        silence_s = prompt.cluster.policy.silence.of_prefill(worker, None)
        num_missing = placement.uncached_tokens
        with prompt.queued.assigned(worker, num_missing):
            async with prefill_call(prompt.cluster, worker, request, trace) as call:
                # The call is read to its end: the worker has forgotten the prompt then, and may get it again at once.
                while (event := await call.next_event(silence_s)) is not None:
                    if event.HasField("progress"):
                        prompt.progressed(worker, event.progress)
                        prompt.queued.update(max(self._num_prompt - event.progress.computed_tokens, 0))
                    yield event

    async def _failed(self, placement: Placement, error: PdserveError) -> None:
        """Notes a failure. Raises `error` when no worker is left that could do better."""
        prompt = self._prompt
        await prompt.losses.note(placement.worker, error)
        if isinstance(error, Draining):
            self._draining.add(placement.incarnation)
        prompt.placer.exclude_prefill(placement, error)
        if self._choose() is None and not self._may_wait():
            raise error
        prompt.journal.append(Retried.of(error, placement.worker))

    def _choose(self) -> Placement | None:
        return self._prompt.placer.choose_without_output(self.version)

    async def _placement(self) -> Placement:
        """A worker to ask. Raises `NoWorkers` when none is expected."""
        waits = 0
        while (placement := self._choose()) is None:
            if not self._may_wait():
                raise NoWorkers(self.no_workers)
            waits += 1
            await self._heartbeat(waits)
        return placement

    def _may_wait(self) -> bool:
        """Whether to wait for a worker. If ready ones stay, all of them have failed the request, and no wait helps."""
        prompt = self._prompt
        staying = {incarnation_of(worker) for worker in prompt.cluster.ready("prefill")} - self._draining
        if staying or not prompt.placer.deaths.may_reach("prefill"):
            return False
        self._was_expected = self._was_expected or prompt.cluster.expects("prefill")
        return self._was_expected
