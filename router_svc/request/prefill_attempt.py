"""One prompt on one prefill worker, from the call to the commit."""

from __future__ import annotations

from contextlib import AsyncExitStack

from pdserve.base.errors import PeerLost
from pdserve.v1 import decode_pb2, prefill_pb2
from router_svc.records.events import Committed, Prefilled, WorkerChosen
from router_svc.request.calls import DecodeCall, prefill_call
from router_svc.request.running_prompt import RunningPrompt
from router_svc.routing.placement import Placement


async def prefill(
    prompt: RunningPrompt, placement: Placement, ticket: decode_pb2.Ticket | None, call: DecodeCall | None
) -> None:
    """Returns when the prefill worker has committed, or when its first tokens alone complete every choice.

    `ticket` and `call` are the decode worker's, or None when the request needs none. Raises the error that the worker
    reported, `PeerLost`, or `TransferTimeout` when it is silent.
    """
    worker, journal, cluster = placement.worker, prompt.journal, prompt.cluster
    trace = journal.append(WorkerChosen.of(placement, remark=prompt.placer.deaths.remark))
    request = prompt.messages.prefill(ticket)
    await prompt.retained.aclose()
    limits = cluster.policy.silence
    silence_s = limits.of_prefill(worker, None if ticket is None else ticket.lease_s)
    with prompt.queued.assigned(worker, placement.uncached_tokens):
        async with AsyncExitStack() as calling:
            prefilling = await calling.enter_async_context(prefill_call(cluster, worker, request, trace))
            while (event := await prefilling.next_event(silence_s)) is not None:
                match event.WhichOneof("event"):
                    case "progress":
                        _take_progress(prompt, placement, event.progress)
                        if call is not None:
                            await call.send(decode_pb2.DecodeRequest(keep_lease=decode_pb2.KeepLease()))
                    case "first_token":
                        prompt.queued.mark_computed()
                        journal.append(Prefilled.of(event.first_token))
                        await prompt.delivery.tokens(event.first_token.choices, call)
                        if prompt.output.is_finished and not _has_started(call):
                            return
                    case "done":
                        journal.append(Committed.of(event.done))
                        prompt.retained.push_async_exit(calling.pop_all())
                        return
    raise PeerLost(f"Prefill worker {worker.worker_id} ended the stream before the transfer was committed.")


def _has_started(call: DecodeCall | None) -> bool:
    """Whether the decode worker's tokens came before the first ones: then the transfer is committed, and reported."""
    return call is not None and call.has_started


def _take_progress(prompt: RunningPrompt, placement: Placement, progress: prefill_pb2.PrefillProgress) -> None:
    prompt.progressed(placement.worker, progress)
    # The worker knows better than the index what it has cached, even while the prompt is queued.
    done = max(progress.computed_tokens, progress.cached_tokens)
    prompt.queued.update(max(placement.prompt_tokens - done, 0))
