"""How operations over torch.distributed end, and what their errors say."""

from __future__ import annotations

from concurrent.futures import Future

from kvtransfer.transport.base import Buffer, Operation
from pdserve.base.errors import PeerLost, TransferError


def finish(operation: Operation, error: PeerLost | None) -> None:
    """Completes or fails it."""
    if error is None:
        operation.complete()
    else:
        operation.fail(error)


def finish_copy(receive: Operation, copied: Future[Buffer]) -> None:
    """Completes or fails a receive whose message had come early, and was copied."""
    error = copied.exception()
    if error is None:
        receive.complete()
    else:
        receive.fail(TransferError(f"A message that came early could not be copied: {error}."))


def wrong_size(num_bytes: int, receive: Operation) -> TransferError:
    """Why a receive cannot take a message."""
    return TransferError(f"A message of {num_bytes} bytes came for a receive of {receive.buffer.nbytes}.")


def closed() -> PeerLost:
    """Why nothing arrives any more."""
    return PeerLost("The transport was closed.")
