"""One prompt's share of a resumable stream: the output that another router had, and what is added to it."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.tasks import in_turns
from pdserve.peers.workers import WorkerRecord
from router_svc.generation import Generation
from router_svc.records.journal import Journal
from router_svc.records.resumable import LoggedStep
from router_svc.records.stream_log import StreamLog
from router_svc.request.output import ChoiceDelta, Output
from router_svc.request.stream import DeltaStream
from router_svc.routing.home import Home, home_of


class PromptLog:
    """One prompt's part of a `StreamLog`."""

    def __init__(self, log: StreamLog, prompt_index: int) -> None:
        self._log = log
        self._prompt_index = prompt_index
        self._steps: list[LoggedStep] = []
        #: Where the last tokens come from.
        self.home = Home()

    def add(self, step: LoggedStep, home: Home) -> None:
        """Another router had this step of the prompt, from `home`."""
        self._steps.append(step)
        self.home = home

    async def replay(self, generation: Generation, output: Output, journal: Journal, stream: DeltaStream) -> None:
        """Passes on the output that another router had, as that router did."""
        steps, self._steps = self._steps, []
        async for step in in_turns(steps):
            deltas = output.push(step.choices)
            journal.resumed(output.completion_tokens, step.cached_tokens)
            stream.push(deltas, first_choice=generation.first_choice)
            await stream.wait_for_room()
        if self._log.is_resumed:
            journal.resumed(output.completion_tokens, journal.record.cached_tokens)

    def append(self, deltas: Sequence[ChoiceDelta], cached_tokens: int, worker: WorkerRecord | None) -> None:
        """New tokens are about to be sent to the client. `worker`: the decode worker of the attempt."""
        if worker is not None:
            self.home = home_of(worker)
        self._log.append(
            self._prompt_index,
            [delta.source for delta in deltas if delta.source is not None],
            cached_tokens=cached_tokens,
            home=self.home,
        )
