"""Ticket and commit, the two values that workers exchange about a transfer, and their checked wire formats."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtransfer.handover.digest import DIGEST_BYTES, DIGESTS, HOST_DIGEST, MAC_BYTES, commit_mac, same_mac
from kvtransfer.handover.layer_groups import LayerGroups, TransferShape, layer_groups_of
from kvtransfer.handover.wire_endpoint import endpoint_from_proto, endpoint_to_proto
from kvtransfer.transport import TRANSPORTS
from kvtransfer.transport.base import TAG_INDEX_BITS
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.addresses import is_host_port
from pdserve.base.errors import DigestMismatch, RequestError
from pdserve.base.ids import Epoch, RequestId, TransferId, WorkerId
from pdserve.base.layout import KvLayout, first_block_read
from pdserve.base.layout_wire import MAX_BLOCK_BYTES, layout_from_proto, layout_to_proto
from pdserve.base.trace_context import TraceContext, parse_traceparent, traceparent_of
from pdserve.v1 import common_pb2, decode_pb2

KEY_BYTES = 32
TRANSFER_ID_BYTES = 16
MAX_MESSAGES = 1 << TAG_INDEX_BITS
MAX_LEASE_S = 3600.0
MAX_ADDRESS_BYTES = 1 << 16
MAX_FIRST_TOKENS = 128
MAX_GUARDED = 64
_MAX_EPOCH = (1 << 63) - 1
_MAX_FIRST_BLOCK = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A decode worker's grant to receive blocks `[first_block, first_block + num_blocks)` of one prompt.

    These are the blocks of the layout's first KV group. Those of another one end with the same block of the prompt.
    """

    transfer_id: TransferId
    attempt: int
    worker_id: WorkerId
    epoch: Epoch
    grpc_address: str
    transport: str
    #: Empty: no worker has needed it so far. A sender that does asks for it.
    data_address: bytes
    first_block: int
    num_blocks: int
    layout: KvLayout
    lease_s: float
    key: bytes
    tag_base: int
    #: Messages per bundle, each with a group of layers; fewer for a KV group that has fewer layers.
    layer_groups: int
    #: First missing block of each further KV group.
    other_first_blocks: tuple[int, ...] = ()
    #: Blocks per bundle; the last bundle may have fewer.
    bundle_blocks: int = 1
    #: Kind of the messages' digests, one of `DIGESTS`.
    digest: str = HOST_DIGEST
    #: Where the decode worker runs; None: it does not report it.
    data_endpoint: DataEndpoint | None = None
    #: Addresses at which data comes only from connections that were introduced; empty: from everybody.
    guarded_addresses: tuple[str, ...] = ()
    #: Span of the reception; None without a trace.
    trace: TraceContext | None = None

    @property
    def groups(self) -> LayerGroups:
        """Layers of each message of a bundle."""
        return LayerGroups.of(self.layout, self.layer_groups)

    @property
    def shape(self) -> TransferShape:
        """Bundles and messages of the transfer."""
        return TransferShape.of(
            num_blocks=[self.end - first for first in self.first_blocks],
            layer_groups=layer_groups_of(self.layout, self.layer_groups),
            bundle_blocks=self.bundle_blocks,
        )

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """First missing block of each KV group."""
        return (self.first_block, *self.other_first_blocks)

    @property
    def end(self) -> int:
        """Index behind the prompt's last block."""
        return self.first_block + self.num_blocks

    def require_end_of(self, num_prompt_tokens: int) -> None:
        """Raises: RequestError unless the missing blocks are the last ones of a prompt with so many tokens.

        Blocks that no token behind the prompt reads are refused, too: a prefill worker may have used them again.
        """
        size = self.layout.block_size
        num_blocks = -(-num_prompt_tokens // size)
        _require(self.end == num_blocks, f"the ticket ends at block {self.end}, and the prompt at block {num_blocks}")
        for index, (first, window) in enumerate(zip(self.first_blocks, self.layout.windows, strict=True)):
            least = first_block_read(window, num_prompt_tokens, size)
            _require(first >= least, f"the ticket starts at block {first} in KV group {index}, before block {least}")

    def tag(self, index: int) -> int:
        """Tag of message `index`, as `TransferShape` numbers them."""
        return self.tag_base + index


def new_tag_base() -> int:
    """A tag with random upper 44 bits, so that two transfers do not share tags."""
    return secrets.randbits(64 - TAG_INDEX_BITS) << TAG_INDEX_BITS


def new_key() -> bytes:
    """A transfer's key, 32 random bytes."""
    return secrets.token_bytes(KEY_BYTES)


def ticket_to_proto(ticket: Ticket) -> decode_pb2.Ticket:
    """The ticket as it travels to the router and the prefill worker."""
    return decode_pb2.Ticket(
        transfer_id=ticket.transfer_id,
        attempt=ticket.attempt,
        worker_id=ticket.worker_id,
        epoch=ticket.epoch,
        grpc_address=ticket.grpc_address,
        transport=ticket.transport,
        data_address=ticket.data_address,
        first_block=ticket.first_block,
        num_blocks=ticket.num_blocks,
        layout=layout_to_proto(ticket.layout),
        lease_s=ticket.lease_s,
        key=ticket.key,
        tag_base=ticket.tag_base,
        layer_groups=ticket.layer_groups,
        bundle_blocks=ticket.bundle_blocks,
        digest=ticket.digest,
        data_endpoint=None if ticket.data_endpoint is None else endpoint_to_proto(ticket.data_endpoint),
        traceparent=traceparent_of(ticket.trace),
        guarded_addresses=ticket.guarded_addresses,
        other_first_blocks=ticket.other_first_blocks,
    )


def ticket_from_proto(message: decode_pb2.Ticket) -> Ticket:
    """The ticket, checked. Raises: RequestError, which names a field that no honest decode worker would send."""
    _require_bytes("transfer_id", message.transfer_id, TRANSFER_ID_BYTES)
    _require_bytes("key", message.key, KEY_BYTES)
    _require_between("epoch", message.epoch, 1, _MAX_EPOCH)
    _require_one_of("transport", message.transport, TRANSPORTS)
    _require_between("length of data_address", len(message.data_address), 0, MAX_ADDRESS_BYTES)
    _require_between("first_block", message.first_block, 0, _MAX_FIRST_BLOCK)
    _require(0 < message.lease_s <= MAX_LEASE_S, f"lease_s is {message.lease_s}, not above 0 and up to {MAX_LEASE_S:g}")
    _require(message.tag_base % MAX_MESSAGES == 0, f"tag_base {message.tag_base:#x} leaves no bits to count messages")
    _require(is_host_port(message.grpc_address), f"grpc_address {message.grpc_address[:100]!r} is not HOST:PORT")
    layout = layout_from_proto(message.layout)
    _require_between("layer_groups", message.layer_groups, 1, layout.num_layers)
    _require_between("num_blocks", message.num_blocks, 0, MAX_MESSAGES // message.layer_groups)
    _require_other_first_blocks(message, layout)
    _require_between("bundle_blocks", message.bundle_blocks, 1, max(1, MAX_BLOCK_BYTES // layout.block_bytes))
    _require_one_of("digest", message.digest, DIGESTS)
    _require_between("number of guarded_addresses", len(message.guarded_addresses), 0, MAX_GUARDED)
    return Ticket(
        transfer_id=TransferId(message.transfer_id),
        attempt=message.attempt,
        worker_id=WorkerId(message.worker_id),
        epoch=Epoch(message.epoch),
        grpc_address=message.grpc_address,
        transport=message.transport,
        data_address=message.data_address,
        first_block=message.first_block,
        num_blocks=message.num_blocks,
        layout=layout,
        lease_s=message.lease_s,
        key=message.key,
        tag_base=message.tag_base,
        layer_groups=message.layer_groups,
        bundle_blocks=message.bundle_blocks,
        digest=message.digest,
        data_endpoint=endpoint_from_proto(message.data_endpoint) if message.HasField("data_endpoint") else None,
        trace=parse_traceparent(message.traceparent),
        guarded_addresses=tuple(message.guarded_addresses),
        other_first_blocks=tuple(message.other_first_blocks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A prefill worker's statement that a transfer is complete: digests of what it sent, and the first tokens."""

    request_id: RequestId
    attempt: int
    transfer_id: TransferId
    epoch: Epoch
    digests: tuple[bytes, ...]
    first_tokens: tuple[int, ...]
    mac: bytes
    #: That of the sender, which the MAC does not cover; empty: it is of an older version.
    numerics_class: str = ""

    def require_authentic(self, key: bytes) -> None:
        """Raises: DigestMismatch unless the MAC was made with the ticket's key over these fields."""
        if not same_mac(self.mac, _mac_of(key, self)):
            raise DigestMismatch(f"The commit of request {self.request_id} is not signed with its ticket's key.")


def signed_commit(
    ticket: Ticket, *, request_id: RequestId, digests: tuple[bytes, ...], first_tokens: tuple[int, ...]
) -> Commit:
    """The commit for a ticket, with its MAC."""
    unsigned = Commit(
        request_id=request_id,
        attempt=ticket.attempt,
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        digests=digests,
        first_tokens=first_tokens,
        mac=b"",
    )
    return replace(unsigned, mac=_mac_of(ticket.key, unsigned))


def commit_to_proto(commit: Commit, numerics_class: str = "") -> decode_pb2.CommitRequest:
    """The commit as it travels to the decode worker, from a worker of this class."""
    return decode_pb2.CommitRequest(
        ref=common_pb2.RequestRef(request_id=commit.request_id, attempt=commit.attempt),
        transfer_id=commit.transfer_id,
        epoch=commit.epoch,
        digests=commit.digests,
        first_tokens=commit.first_tokens,
        mac=commit.mac,
        numerics_class=numerics_class,
    )


def commit_from_proto(message: decode_pb2.CommitRequest) -> Commit:
    """The commit, checked. Raises: RequestError, which names a field that no honest prefill worker would send."""
    _require_bytes("transfer_id", message.transfer_id, TRANSFER_ID_BYTES)
    _require_bytes("mac", message.mac, MAC_BYTES)
    _require_between("epoch", message.epoch, 1, _MAX_EPOCH)
    _require_between("number of digests", len(message.digests), 0, MAX_MESSAGES)
    has_digests = all(len(digest) == DIGEST_BYTES for digest in message.digests)
    _require(has_digests, f"one of the digests does not have {DIGEST_BYTES} bytes")
    _require_between("number of first_tokens", len(message.first_tokens), 1, MAX_FIRST_TOKENS)
    return Commit(
        request_id=RequestId(message.ref.request_id),
        attempt=message.ref.attempt,
        transfer_id=TransferId(message.transfer_id),
        epoch=Epoch(message.epoch),
        digests=tuple(message.digests),
        first_tokens=tuple(message.first_tokens),
        mac=message.mac,
        numerics_class=message.numerics_class,
    )


def _mac_of(key: bytes, commit: Commit) -> bytes:
    numbers = commit.attempt.to_bytes(4, "little") + commit.epoch.to_bytes(8, "little")
    tokens = b"".join(token.to_bytes(4, "little") for token in commit.first_tokens)
    return commit_mac(key, commit.transfer_id, commit.request_id.encode(), numbers, b"".join(commit.digests), tokens)


def _require_other_first_blocks(message: decode_pb2.Ticket, layout: KvLayout) -> None:
    end, others = message.first_block + message.num_blocks, message.other_first_blocks
    _require_between("number of other_first_blocks", len(others), len(layout.groups) - 1, len(layout.groups) - 1)
    for first in others:
        _require_between("one of other_first_blocks", first, 0, end)
    num_blocks = message.num_blocks + sum(end - first for first in others)
    _require_between("blocks of all KV groups", num_blocks, 0, MAX_MESSAGES // message.layer_groups)


def _require_bytes(name: str, value: bytes, num_bytes: int) -> None:
    _require(len(value) == num_bytes, f"{name} has {len(value)} bytes, not {num_bytes}")


def _require_between(name: str, value: int, least: int, greatest: int) -> None:
    _require(least <= value <= greatest, f"{name} is {value}, not {least} to {greatest}")


def _require_one_of(name: str, value: str, known: Sequence[str]) -> None:
    _require(value in known, f"{name} {value!r} is not one of {', '.join(known)}")


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise RequestError(f"Malformed transfer message: {fault}.")
