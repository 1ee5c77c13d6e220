"""A request on decode workers: on one, or, while it moves, on two, the second of which follows the first.

    current    | ------ asks to be left ------ left
    target                   | blocks, tokens --- takes over, is current -->

A worker asks to be left when it drains, is full, or has more to do than others. While no other worker can take the
request, it stays. A target that fails is given up; a current worker that is lost is replaced by a target that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdserve.base.errors import PdserveError
from pdserve.v1 import decode_pb2
from router_svc.records.events import MigrationOutcome, MoveEnded, MoveStarted, WorkerChosen
from router_svc.request.calls import DecodeCall, DecodeFailed, decode_call
from router_svc.request.decode_attempt import DecodeAttempt
from router_svc.request.migration.target import MigrationTarget
from router_svc.request.running_prompt import RunningPrompt
from router_svc.routing.incarnation import Incarnation, incarnation_of
from router_svc.routing.local_prefill import ALWAYS_LOCAL
from router_svc.routing.placement import Placement

#: Pause before another worker is looked for again for a request that should move. It doubles with each failed move.
_RETRY_S, _MAX_RETRY_S = 0.25, 4.0


@dataclass(slots=True, eq=False)
class _WorkerRun:
    """The request on one worker."""

    placement: Placement
    #: Set once the call is open.
    call: DecodeCall | None = None
    #: For a worker that follows another one: what passes tokens on and takes over.
    target: MigrationTarget | None = None
    #: The error that ended it; None if every choice is complete.
    task: asyncio.Task[DecodeFailed | PdserveError | None] = field(init=False)


class MigratingRun:
    """Runs a request until every choice is complete. `placement` is where it runs now, or ran last."""

    def __init__(self, prompt: RunningPrompt, placement: Placement) -> None:
        self.placement = placement
        self._prompt = prompt
        self._cluster = prompt.cluster
        self._journal = prompt.journal
        self._placer = prompt.placer
        #: Set at each event that may call for a step.
        self._changed = asyncio.Event()
        self._next_run: _WorkerRun | None = None
        #: Why the request moves.
        self._reason = ""
        self._num_moves = 0
        #: Workers to which a move has failed.
        self._failed: set[Incarnation] = set()
        #: Whether blocks may be copied; else they are computed again.
        self._may_copy = True
        self._retry_s = _RETRY_S
        self._next_try_at = 0.0

    async def run(self, start: decode_pb2.DecodeStart) -> None:
        """Returns when every choice is complete. Raises `DecodeFailed`, or an error for the client."""
        async with asyncio.TaskGroup() as tasks:
            worker_run = _WorkerRun(self.placement)

            async def attempt(call: DecodeCall) -> None:
                await DecodeAttempt(self._prompt, call).run(start)

            self._serve(tasks, worker_run, attempt)
            error = await self._supervise(tasks, worker_run)
            if self._next_run is not None:
                self._next_run.task.cancel()
        # The error is not raised within the block: the task group would make an exception group of it. What fails
        # behind the last token harms nobody: a worker that took over may have brought it before it was lost.
        if error is not None and not self._prompt.output.is_finished:
            raise error

    def _serve(
        self, tasks: asyncio.TaskGroup, worker_run: _WorkerRun, run: Callable[[DecodeCall], Awaitable[None]]
    ) -> None:
        """Opens a call to its worker, in a task that ends with the error of `run`, if any."""
        worker, counted = worker_run.placement.worker, contextlib.ExitStack()
        # The sequences count from now on, not from the task's first turn: other requests are placed before that.
        sequences = self._prompt.generation.sampling.n
        counted.enter_context(self._cluster.in_flight.decoding(worker.worker_id, sequences))

        async def serve() -> DecodeFailed | PdserveError | None:
            try:
                async with decode_call(worker, self._cluster.streams, self._changed.set) as call:
                    worker_run.call = call
                    await run(call)
            except (DecodeFailed, PdserveError) as error:
                return error
            return None

        worker_run.task = tasks.create_task(serve(), name=f"decode on {worker.worker_id}")

        def ended(_: object) -> None:
            counted.close()
            self._changed.set()

        worker_run.task.add_done_callback(ended)

    async def _supervise(self, tasks: asyncio.TaskGroup, current: _WorkerRun) -> DecodeFailed | PdserveError | None:
        """Returns the error with which the request has ended here, or None when every choice is complete."""
        while True:
            await self._change()
            await self._name_replica(current)
            next_run = self._next_run
            if next_run is not None and next_run.target is not None and next_run.target.has_caught_up:
                # The task is not cancelled: what it delivers at the moment reaches the client.
                assert current.call is not None
                current.call.close()
                current = self._switch(next_run)
            elif current.task.done():
                error = current.task.result()
                if error is None or next_run is None or not _runs(next_run):
                    if error is not None and next_run is not None:
                        self._end_move(MigrationOutcome.FAILED, error=error)
                    return error
                assert next_run.target is not None
                await next_run.target.take_over()
                if (fatal := await self._noted(error)) is not None:
                    return fatal
                current = self._switch(next_run, source_lost=error)
            elif next_run is None:
                self._consider(tasks, current)
            elif next_run.task.done():
                if (error := next_run.task.result()) is None:
                    return None
                if (fatal := await self._give_up(next_run, error)) is not None:
                    return fatal

    async def _change(self) -> None:
        """Returns at the next event, or when a move may be tried again."""
        until = self._next_try_at if self._next_try_at and self._next_run is None else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        self._changed.clear()

    async def _name_replica(self, current: _WorkerRun) -> None:
        """Answers a worker that asks where to copy the request's blocks. Without an answer it asks again."""
        call, placer = current.call, self._placer
        if call is None or call.replica_wanted is None:
            return
        failed, call.replica_wanted = call.replica_wanted, None
        excluded = {placer.replica} if placer.replica is not None and placer.replica[1] == failed else set()
        placer.replica, source = None, current.placement.worker
        target = placer.choose_move(source, excluded, needs_room=True)
        if target is None:
            return
        worker, placer.replica = target.worker, target.incarnation
        replicate_to = decode_pb2.ReplicateTo(
            worker_id=worker.worker_id, epoch=worker.epoch, grpc_address=worker.grpc_address
        )
        await call.send(decode_pb2.DecodeRequest(replicate_to=replicate_to))

    # Moves.
    def _consider(self, tasks: asyncio.TaskGroup, current: _WorkerRun) -> None:
        """Starts a move if the current worker asks for one and another worker can take the request."""
        now = asyncio.get_running_loop().time()
        call = current.call
        if call is None or not call.leave_reason:
            self._next_try_at = 0.0
            return
        if now < self._next_try_at:
            return
        self._next_try_at = now + self._retry_s
        output = self._prompt.output
        can_move = call.has_started and output.has_first_tokens and not output.is_finished
        if not can_move or self._placer.deaths.tier is not None:
            return
        target = self._placer.choose_move(current.placement.worker, self._failed, needs_room=not call.must_leave)
        if target is not None:
            self._reason = call.leave_reason
            self._start(tasks, current, target)
        elif not call.must_leave:
            # The worker asks again if the request still has to leave.
            call.leave_reason, self._next_try_at = "", 0.0

    def _start(self, tasks: asyncio.TaskGroup, current: _WorkerRun, target: Placement) -> None:
        source = current.call
        assert source is not None
        has_output = len(self._prompt.output.continuation) == self._prompt.generation.sampling.n
        is_copied = self._may_copy and has_output and target.worker.layout.windows == (None,)
        move = MoveStarted(
            number=self._journal.record.log.num(MoveStarted) + 1,
            reason=self._reason,
            source=current.placement.worker.worker_id,
            target=target.worker.worker_id,
            is_copied=is_copied,
        )
        self._journal.append(move)
        trace = self._journal.append(WorkerChosen.of(target, move=move))
        sender = current.placement.worker if is_copied else None
        start = self._prompt.messages.decode(0 if is_copied else ALWAYS_LOCAL, trace, source=sender)
        worker_run = self._next_run = _WorkerRun(target)
        self._num_moves += 1
        number = self._num_moves

        async def follow(call: DecodeCall) -> None:
            worker_run.target = MigrationTarget(self._prompt, source, call, self._changed.set, number=number)
            source.on_handed_off = worker_run.target.handed_off
            await worker_run.target.run(start)

        self._serve(tasks, worker_run, follow)

    def _end_move(
        self, outcome: MigrationOutcome, *, sent_blocks: int = 0, error: DecodeFailed | PdserveError | None = None
    ) -> None:
        number = self._journal.record.log.num(MoveStarted)
        text = None if error is None else str(error.error if isinstance(error, DecodeFailed) else error)
        self._journal.append(MoveEnded(number=number, outcome=outcome, sent_blocks=sent_blocks, error=text))

    def _switch(self, next_run: _WorkerRun, *, source_lost: DecodeFailed | PdserveError | None = None) -> _WorkerRun:
        """The target is the current worker from now on. `source_lost`: the error of the worker that was."""
        assert next_run.target is not None
        outcome = MigrationOutcome.MOVED if source_lost is None else MigrationOutcome.SOURCE_LOST
        self._end_move(outcome, sent_blocks=next_run.target.sent_blocks, error=source_lost)
        self.placement, self._next_run = next_run.placement, None
        self._failed.clear()
        self._may_copy, self._retry_s, self._next_try_at = True, _RETRY_S, 0.0
        self._changed.set()  # The worker may ask to be left already.
        return next_run

    async def _give_up(self, next_run: _WorkerRun, error: DecodeFailed | PdserveError) -> PdserveError | None:
        """The request stays where it is. Returns an error that ends it, if this was one loss too many."""
        self._next_run = None
        self._end_move(MigrationOutcome.FAILED, error=error)
        fault = error.worker if isinstance(error, DecodeFailed) else next_run.placement.worker
        if self._may_copy and incarnation_of(fault) != next_run.placement.incarnation:
            self._may_copy = False  # The source could not send: the target may compute.
        else:
            self._failed.add(next_run.placement.incarnation)
            self._may_copy = True
        self._next_try_at = asyncio.get_running_loop().time() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        return await self._noted(error)

    async def _noted(self, error: DecodeFailed | PdserveError) -> PdserveError | None:
        """Takes note of a worker that may be lost. Returns the error for a client that has lost too many."""
        if not isinstance(error, DecodeFailed):
            return None
        try:
            await self._prompt.losses.note(error.worker, error.error)
        except PdserveError as fatal:
            return fatal
        return None


def _runs(next_run: _WorkerRun) -> bool:
    """Whether the target has the KV, so that it can go on without the worker that it follows."""
    return next_run.call is not None and next_run.call.has_started and not next_run.task.done()
