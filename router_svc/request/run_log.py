"""The resumable stream of one client request while it runs here: what is begun, ended and charged, once in all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from pdserve.base.errors import CapacityError, PdserveError, StaleError, TransferError, error_classes
from pdserve.base.tasks import run_to_completion
from router_svc.records.journal import Journal
from router_svc.records.request_state import RequestState
from router_svc.records.resumable import Charge
from router_svc.records.stream_log import Ending, StreamLog
from router_svc.records.stream_logs import StreamLogs
from router_svc.records.usage import Usage, tokens_charged, usage_of
from router_svc.request.prompt_log import PromptLog
from router_svc.request.stream import DeltaStream


class RunLog:
    """A request's `StreamLog`, or none."""

    def __init__(
        self, log: StreamLog | None, journals: Sequence[Journal], logs: StreamLogs | None, stream: DeltaStream
    ) -> None:
        """`stream` ends when another router resumes it."""
        self._log = log
        self._logs = logs
        self._journals = journals
        #: Called when the request has ended, before `is_ours` is final.
        self.on_end: Callable[[], None] = lambda: None
        #: What other routers have charged for the request.
        self.charged = Charge() if log is None else log.charge
        if log is not None:
            header_id = log.resumable.shape.header_id
            log.on_taken = lambda: stream.abort(
                StaleError(f"The stream {header_id} has ended here because its client has resumed it.")
            )
        self._prompt_logs = [] if log is None else [PromptLog(log, index) for index in range(len(journals))]

    @property
    def lease(self) -> str:
        """Lease of the limits that the request has reserved; empty: it has none."""
        return "" if self._log is None else self._log.lease

    @lease.setter
    def lease(self, lease: str) -> None:
        if self._log is not None:
            self._log.lease = lease

    @property
    def is_ours(self) -> bool:
        """Whether this router runs and charges the request. Another one does once it has resumed it."""
        return self._log is None or self._log.is_ours

    @property
    def tokens_charged(self) -> int:
        """Tokens that count for the limits of the client's key."""
        return sum(tokens_charged(journal.record) for journal in self._journals)

    @property
    def prompt_logs(self) -> Sequence[PromptLog | None]:
        """One for each prompt; None: its output is not kept."""
        return self._prompt_logs or [None] * len(self._journals)

    @property
    def is_resumed(self) -> bool:
        """Whether another router has started the request."""
        return self._log is not None and self._log.is_resumed

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """This router runs a stream that another one has started, from now on; leaving the block ends that.

        Raises `StoreError`, or `NotFound` when the stream has ended meanwhile.
        """
        assert self._log is not None
        assert self._logs is not None
        await self._log.take()
        try:
            self.charged = self._log.charge
            async for step in self._log.steps():
                self._prompt_logs[step.prompt_index].add(step, self._log.home)
            yield
        finally:
            if not self._log.has_ended:  # The request was refused after all.
                await run_to_completion(self._logs.end(self._log, Ending.LEFT, self._log.charge))

    def begin(self) -> None:
        """The request has been accepted."""
        if self._log is not None and not self._log.is_resumed:
            self._log.begin()

    async def end(self) -> None:
        """The request has ended. `is_ours` is final afterwards."""
        if self._log is None or self._logs is None:
            return
        self.on_end()
        charge = Charge(usage=usage_of_all(self._journals), limit_tokens=self.tokens_charged)
        await run_to_completion(self._logs.end(self._log, self._ending(), charge))

    def _ending(self) -> Ending:
        ends = [journal.record.end for journal in self._journals]
        if any(end.state is RequestState.FAILED and not _can_go_on(end.outcome) for end in ends if end is not None):
            return Ending.FAILED
        # A client that cancels a request by its id does not want the rest, unlike one whose connection broke.
        if any(end.state is RequestState.CANCELLED and end.error for end in ends if end is not None):
            return Ending.FAILED
        is_complete = all(end is not None and end.state is RequestState.FINISHED for end in ends)
        return Ending.COMPLETE if is_complete else Ending.LEFT


def _can_go_on(error_name: str) -> bool:
    """Whether a request that ended with this error may do better at another time: the cluster was at fault."""
    return issubclass(error_classes().get(error_name, PdserveError), (CapacityError, TransferError))


def usage_of_all(journals: Sequence[Journal]) -> Usage:
    """What a client request has used, over all of its prompts."""
    return sum((usage_of(journal.record) for journal in journals), start=Usage(requests=1))
