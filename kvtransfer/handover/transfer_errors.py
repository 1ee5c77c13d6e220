"""The texts of errors in a handover, apart from malformed messages: what failed, on what, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.handover.layer_groups import TransferShape
from pdserve.base.errors import (
    DigestMismatch,
    InvalidTransition,
    PdserveError,
    PeerLost,
    StaleAttempt,
    StaleEpoch,
    StaleError,
    TransferError,
    TransferTimeout,
)
from pdserve.base.ids import RequestId, WorkerId


# Both sides.
def of_transport(error: PdserveError) -> TransferError:
    """What the failure of a message means for its transfer."""
    return error if isinstance(error, TransferError) else PeerLost(str(error))


def lease_over(lease_s: float, num_through: int, shape: TransferShape) -> TransferTimeout:
    """No sign of progress for a whole lease."""
    error = TransferTimeout(f"The lease ended: no progress for {lease_s:g} s, {num_through} of {shape} had arrived.")
    error.progress = "nothing" if not num_through else "some" if num_through < shape.num_messages else "all"
    return error


def illegal_event(state: str, event: object, story: Sequence[str]) -> InvalidTransition:
    """A state machine's table has no such move."""
    return InvalidTransition(
        f"A transfer that is {state} does not take {event!r}. Its way so far: {' -> '.join(story)}."
    )


def not_outstanding(index: int, shape: TransferShape) -> InvalidTransition:
    """A message ended twice, or does not exist."""
    return InvalidTransition(f"Message {index} ({shape.name(index)}) is not outstanding; the transfer has {shape}.")


# The decode side.
def digests_differ(wrong: Sequence[int], shape: TransferShape) -> DigestMismatch:
    """Bytes that arrived are not those that were sent."""
    return DigestMismatch(f"{len(wrong)} of {shape} are not what was sent, the first is {shape.name(wrong[0])}.")


def digests_miscounted(num_digests: int, shape: TransferShape) -> DigestMismatch:
    """A commit for a transfer of another shape."""
    return DigestMismatch(f"The commit has {num_digests} digests for {shape}.")


def given_up() -> StaleAttempt:
    """A commit came after its transfer was aborted."""
    return StaleAttempt("The transfer was given up.")


def other_attempt(commit: int, ticket: int) -> StaleAttempt:
    """A commit for another ticket of the same request."""
    return StaleAttempt(f"The commit is for attempt {commit} and the ticket for attempt {ticket}.")


def other_request(request_id: RequestId) -> StaleError:
    """A commit from a request that the ticket was not granted to."""
    return StaleError(f"The ticket was granted to request {request_id}.")


def other_commit() -> StaleAttempt:
    """A second commit that differs from the first."""
    return StaleAttempt("Another commit of this transfer came first.")


def reservation_over() -> StaleError:
    """A ticket cannot be renewed: it was committed, aborted, or its lease ended."""
    return StaleError("The reservation is over: there is no ticket to renew.")


def attempt_not_newer(attempt: int, ticket: int) -> StaleAttempt:
    """A renewal for an attempt that the ticket has already."""
    return StaleAttempt(f"Attempt {attempt} is not newer than the ticket's, {ticket}.")


def unknown_transfer(request_id: RequestId) -> StaleError:
    """A commit for a transfer that is over or never was."""
    return StaleError(f"There is no such transfer for request {request_id}: it was given up or never granted.")


def worker_restarted(worker_id: WorkerId) -> StaleEpoch:
    """A commit for an earlier incarnation of the worker."""
    return StaleEpoch(f"Worker {worker_id} has been restarted since it granted the ticket.")


# The prefill side.
def out_of_order(index: int, expected: int | None, shape: TransferShape) -> InvalidTransition:
    """A layer group does not go through the bundles in order, each once."""
    following = "nothing" if expected is None else shape.name(expected)
    return InvalidTransition(f"Message {index} ({shape.name(index)}) is out of order: {following} is next of {shape}.")


def not_all_sent(num_unsent: int, shape: TransferShape) -> InvalidTransition:
    """A commit before the last message."""
    return InvalidTransition(f"The transfer cannot be committed: {num_unsent} of {shape} were not sent.")


def transfer_over() -> TransferError:
    """Something is to be sent after the transfer was committed or aborted."""
    return TransferError("The transfer is over.")


def commit_unanswered(lease_s: float) -> TransferTimeout:
    """Everything got through, and then there was silence."""
    return TransferTimeout(f"The decode worker did not answer the commit within the lease of {lease_s:g} s.")


def sends_stuck(lease_s: float) -> PeerLost:
    """The peer is disconnected because it does not read."""
    return PeerLost(f"The decode worker did not take what was sent within the lease of {lease_s:g} s.")


def transport_differs(ticket: str, own: str) -> TransferError:
    """The two tiers were started with different transports."""
    return TransferError(
        f"The ticket is for transport {ticket!r} and this worker uses {own!r}. "
        "Start both tiers with the same --transport."
    )


def digest_differs(ticket: str, own: str) -> TransferError:
    """The two tiers were started with different handover memories."""
    return TransferError(
        f"The ticket asks for {ticket!r} digests and this worker's memory has {own!r} digests. "
        "Start both tiers with the same --handover-memory."
    )
