"""Messages of a call whose own tasks are cancelled while one is on its way."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest

from pdserve.base.errors import TransferTimeout
from pdserve.net.grpc_server import whole_writes
from pdserve.net.rpc import mapped_rpc_errors, method, open_channel, serve_grpc
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc
from tests.support.deadline import DEADLINE_S

#: Turns of the event loop that a write has had when it is cancelled. It takes a few to leave.
TURNS = (0, 1, 2)


class Cancelling(prefill_pb2_grpc.PrefillServiceServicer):
    """Cancels the task of its first message, as a failing sibling does, and fails."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    @method
    async def Prefill(  # noqa: N802 - the name is the wire's
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        write = whole_writes(context)
        message = prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress(computed_tokens=7))
        writing = asyncio.ensure_future(write(message))
        for _ in range(1 + self._turns):
            await asyncio.sleep(0)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        raise TransferTimeout("The lease is over.")


@pytest.mark.parametrize("turns", TURNS)
async def test_the_status_follows_a_message_whose_task_was_cancelled(turns: int) -> None:
    """Fails without `whole_writes`: grpc refuses the status, and the caller waits for it in vain."""

    def register(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(Cancelling(turns), server)

    async with (
        serve_grpc(register, [], host="127.0.0.1", port=0, flag="--grpc-port", grace_s=0) as (address, _),
        open_channel(address) as channel,
        asyncio.timeout(DEADLINE_S),
    ):
        with pytest.raises(TransferTimeout, match="The lease is over"), mapped_rpc_errors("worker"):
            events = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest())
            assert (await anext(aiter(events))).progress.computed_tokens == 7
            await anext(aiter(events))
