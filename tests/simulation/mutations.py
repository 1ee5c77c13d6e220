"""Changes of the product that the simulation has to find: each takes away one thing that keeps a promise.

`python -m tests.simulation --mutation NAME` runs with one of them until an episode fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from decode_svc.replication.target import ReplicationTarget
from decode_svc.request import DecodePhase
from decode_svc.scheduler import DecodeScheduler
from decode_svc.session import DecodeSession
from kvtransfer.handover.outgoing import OutgoingTransfer
from kvtransfer.handover.receive_machine import ReceiveMachine
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.send_machine import SendMachine
from pdserve.base.wire import tokens_from_wire
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.running import RunningSet
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.net.streams import MessageStream
from pdserve.peers.workers import WorkerView
from pdserve.worker.serve.inboxes import Inboxes
from router_svc.api.event_ids import EventIds
from router_svc.records.resumable import single_tokens
from router_svc.request import decode_attempt
from router_svc.request.decode_attempt import DecodeAttempt
from router_svc.request.delivery import Delivery
from router_svc.request.gate import Gate
from router_svc.request.open_requests import OpenRequest, OpenRequests
from router_svc.request.output import Output, _Choice
from router_svc.request.recovery import NextStep


def _forget_a_release() -> None:
    """A request that ends while it waits for its KV keeps its blocks."""
    finish = DecodeScheduler._finish

    def leaking(scheduler: Any, request: Any, outcome: Any) -> None:
        if request.phase is DecodePhase.RESERVED:
            request.prompt_sequence.block_table = type(request.prompt_sequence.block_table)("q")
        finish(scheduler, request, outcome)

    _set(DecodeScheduler, "_finish", leaking)


def _free_before_quiet() -> None:
    """Blocks are freed while a transfer may still write to them."""

    async def release(session: Any) -> None:
        session._activation_decided.set()
        await session._worker.run(lambda: session._scheduler.abort(session._request_id))

    _set(DecodeSession, "_release", release)


def _accept_any_digest() -> None:
    """What arrives is committed, whatever it is."""
    received = ReceiveMachine._on_commit

    def trusting(machine: Any, commit: Any, now: float) -> Any:
        machine._digests = _Equal(machine._digests)
        return received(machine, commit, now)

    _set(ReceiveMachine, "_on_commit", trusting)


class _Different:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _Equal(list[Any]):
    """Digests that differ from none."""

    def __iter__(self) -> Any:
        return iter([_Different() for _ in range(len(self))])


def _renew_without_an_end() -> None:
    """A renewed ticket leaves the old one valid."""

    async def renew(receiver: Any, transfer_id: Any, *, attempt: int) -> Any:
        return await receiver.grant(receiver._transfers[transfer_id].reservation, attempt=attempt)

    _set(Receiver, "renew", renew)


def _ignore_positions() -> None:
    """Tokens that a client has already are sent again."""
    take = _Choice._take

    def taking(choice: Any, chunk: Any, gained: Any) -> None:
        import dataclasses

        take(choice, dataclasses.replace(chunk, first_index=len(choice.token_ids)), gained)

    _set(_Choice, "_take", taking)


def _count_usage_twice() -> None:
    """Tokens that come again are counted again."""
    push = Output.push

    def counting(output: Any, tokens: Iterable[Any]) -> Any:
        chunks = list(tokens)
        before = output.completion_tokens
        deltas = push(output, chunks)
        output.completion_tokens = before + sum(len(chunk.token_ids) for chunk in chunks)
        return deltas

    _set(Output, "push", counting)


def _register_too_early() -> None:
    """A block can be found by others before its last token is computed."""
    advance = BlockManager.advance

    def early(manager: Any, sequence: Any, num_computed: int) -> None:
        size = manager.pool.block_size
        is_near = num_computed % size == size - 1 and num_computed < len(sequence.tokens)
        advance(manager, sequence, num_computed + 1 if is_near else num_computed)
        sequence.num_computed = num_computed

    _set(BlockManager, "advance", early)


def _share_without_a_copy() -> None:
    """Choices write to the prompt's last block, which they share."""

    def ref_count(pool: Any, block: int) -> int:
        return 1

    _set(BlockPool, "ref_count", ref_count)


def _lose_a_preempted_sequence() -> None:
    """A sequence that gives up its blocks is not resumed."""

    def resume(running: Any) -> None:
        pass

    _set(RunningSet, "resume", resume)


def _let_go_of_blocks_on_the_wire() -> None:
    """A sender that stops frees its blocks at once, and digests are not compared: one fault that hides another."""

    def release(machine: Any) -> Any:
        machine._outstanding.clear()
        return try_release(machine)

    try_release = SendMachine._try_release
    _set(SendMachine, "_try_release", release)


def _keep_a_queue_slot() -> None:
    """A request that fails or leaves keeps its place."""
    leave = Gate.leave

    def staying(gate: Any, slot: Any) -> None:
        if slot.sequences < 2:
            leave(gate, slot)

    _set(Gate, "leave", staying)


def _wait_for_lost_first_tokens() -> None:
    """A prefill worker that dies between its commit and its first tokens is not missed."""
    after = decode_attempt.after_prefill_failure

    def carrying_on(*arguments: Any, **named: Any) -> NextStep:
        step = after(*arguments, **named)
        return NextStep.CARRY_ON if step is NextStep.FAIL_ATTEMPT else step

    module: Any = decode_attempt
    module.after_prefill_failure = carrying_on
    _set(DecodeAttempt, "_require_first_tokens", lambda *_: None)


def _never_forgive() -> None:
    """A worker that was lost once stays excluded, whatever it reports."""
    _set(WorkerView, "_clear_suspicions", lambda view, seen, read_at: False)


def _leave_the_older_attempt() -> None:
    """A newer attempt does not end an older one on the same worker."""
    open_inbox = Inboxes.open

    def opening(inboxes: Any, request_id: Any, attempt: int) -> Any:
        inboxes._inboxes.pop(request_id, None)
        return open_inbox(inboxes, request_id, attempt)

    _set(Inboxes, "open", opening)


def _no_lease() -> None:
    """Time ends no reservation."""
    _set(ReceiveMachine, "_on_time", lambda machine, now: [])


def _send_no_keep_alives() -> None:
    """Streams are silent while nothing is to be said."""
    _set(MessageStream, "keep_alive", lambda stream, message: None)


def _send_a_block_twice() -> None:
    """A sender repeats the first block in place of the second."""
    push = OutgoingTransfer.push

    async def pushing(transfer: Any, block_ids: Any, *, group: int = 0, after: Any = None) -> None:
        blocks = list(block_ids)
        if len(blocks) > 1:
            blocks[1] = blocks[0]
        await push(transfer, blocks, group=group, after=after)

    _set(OutgoingTransfer, "push", pushing)


def _damage_a_copy() -> None:
    """What was copied is not what the prefix cache has then."""
    end = ReplicationTarget._end

    def damaging(intake: Any, name: Any, *, is_there: bool) -> None:
        cache = intake._worker.model.kv_cache
        if is_there:
            cache.memory.reshape(cache.num_blocks, -1)[intake._replicas._arriving[name].blocks] ^= 1
        end(intake, name, is_there=is_there)

    _set(ReplicationTarget, "_end", damaging)


def _ignore_cancels() -> None:
    """A request goes on after its owner has cancelled it."""
    _set(OpenRequest, "cancel", lambda opened: opened._ended.set())


def _ignore_deadlines() -> None:
    """A request goes on after its deadline."""
    _set(OpenRequest, "_reschedule", lambda opened, when: None)
    entered = OpenRequests.entered

    def unlimited(requests: Any, request_id: Any, tenant: str, timeout_s: float) -> Any:
        return entered(requests, request_id, tenant, 3600.0)

    _set(OpenRequests, "entered", unlimited)


def _repeat_what_a_client_has() -> None:
    """A stream that goes on at another router starts again."""
    number = EventIds.__init__

    def numbering(ids: Any, name: str, num_choices: int, seen: Any = None) -> None:
        number(ids, name, num_choices)

    _set(EventIds, "__init__", numbering)


def _write_in_the_attempt() -> None:
    """Tokens wait for the client in the attempt that has brought them, and end with it."""

    async def deliver(delivery: Any, tokens: Any, call: Any) -> None:
        chunks = map(tokens_from_wire, tokens)
        deltas = delivery._output.push(chunks if delivery._log is None else single_tokens(chunks))
        await delivery._stream.wait_until_written()
        delivery._pass_on(deltas, call)

    _set(Delivery, "tokens", deliver)


def _let_go_late() -> None:
    """A decode worker keeps the blocks of a request that has ended for a while."""
    release = DecodeSession._release

    async def releasing(session: Any) -> None:
        await asyncio.sleep(1.0)
        await release(session)

    _set(DecodeSession, "_release", releasing)


def _replay_no_tokens() -> None:
    """Grammars and budgets for thinking start empty on a worker that goes on with an output."""
    _forget_outputs_of(1)


def _replay_no_recovered_tokens() -> None:
    """They do so behind a loss or a move, and not behind a handover, which has one token."""
    _forget_outputs_of(2)


def _forget_outputs_of(least: int) -> None:
    sample_row = SequenceLimits.sample_row

    def forgetting(limits: Any, sequence: Any, choice_index: int) -> Any:
        row = sample_row(limits, sequence, choice_index)
        state: Any = row.grammar
        if state is not None and row.position >= least:
            assert state._num_tokens == 0
            state._num_tokens = row.position
        return row

    _set(SequenceLimits, "sample_row", forgetting)


def _set(owner: type, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: change the mutation"
    setattr(owner, name, value)


MUTATIONS: dict[str, Callable[[], None]] = {
    name.removeprefix("_").replace("_", "-"): function
    for name, function in list(globals().items())
    if name.startswith("_") and callable(function) and function.__doc__ and not isinstance(function, type)
    if name not in ("_set", "__loader__")
}
