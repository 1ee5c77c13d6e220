"""Values around a transfer into a decode worker: its identity, the blocks it reserves, and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtransfer.handover.layer_groups import TransferShape
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.errors import PdserveError
from pdserve.base.ids import BlockId, Epoch, RequestId, TransferId, WorkerId
from pdserve.base.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverIdentity:
    """The worker, as its tickets describe it."""

    worker_id: WorkerId
    epoch: Epoch
    grpc_address: str
    layout: KvLayout
    #: Messages in which each block is sent, at most one per layer.
    layer_groups: int = 1
    #: Where the worker runs; None: its tickets do not say.
    data_endpoint: DataEndpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A verified transfer: the blocks hold what the prefill worker computed."""

    request_id: RequestId
    transfer_id: TransferId
    first_tokens: tuple[int, ...]
    received_blocks: int
    received_bytes: int
    #: Time from the first to the last received message.
    receive_s: float
    #: That of the sender; empty: it is of an older version.
    numerics_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks that are to be filled for one request, of each KV group.

    Either `on_received` or `on_expired` is called, once, on the event loop, unless `Receiver.abort` comes first.
    After `on_expired` nothing writes to the blocks any more and they may be freed. Neither may raise.
    """

    request_id: RequestId
    block_ids: tuple[Sequence[BlockId], ...]
    #: Index of the first of them among the prompt's blocks. All KV groups end with the prompt's last block.
    first_blocks: tuple[int, ...]
    lease_s: float
    #: Whether a sender asks for the data address if it needs it, and its ticket has none.
    senders_ask: bool = False
    on_received: Callable[[Received], None]
    on_expired: Callable[[PdserveError], None]

    def bundles(self, shape: TransferShape) -> list[Sequence[BlockId]]:
        """The bundles of a transfer of these blocks, as `shape` numbers them."""
        return [bundle for block_ids in self.block_ids for bundle in shape.bundles(block_ids)]
