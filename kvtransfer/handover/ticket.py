"""The values two workers exchange about a transfer, checked when they come off the wire: the ticket and the commit."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace

from kvtransfer.handover.digest import DIGEST_BYTES, DIGESTS, HOST_DIGEST, MAC_BYTES, commit_mac, same_mac
from kvtransfer.handover.layer_groups import Bundles, LayerGroups
from kvtransfer.transport import TRANSPORTS
from pdserve.base.errors import DigestMismatch, RequestError
from pdserve.base.ids import Epoch, RequestId, TransferId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.v1 import common_pb2, decode_pb2

KEY_BYTES = 32
TRANSFER_ID_BYTES = 16
#: Message tags of a transfer: the upper bits are random, the lower ones count its messages.
TAG_INDEX_BITS = 20
MAX_MESSAGES = 1 << TAG_INDEX_BITS
MAX_LEASE_S = 3600.0
MAX_ADDRESS_BYTES = 1 << 16
MAX_BLOCK_BYTES = 1 << 30
MAX_FIRST_TOKENS = 128
_MAX_DIMENSION = 1 << 20
_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A decode worker's grant to receive blocks `[first_block, first_block + num_blocks)` of one prompt."""

    transfer_id: TransferId
    attempt: int
    worker_id: WorkerId
    epoch: Epoch
    grpc_address: str
    transport: str
    data_address: bytes
    first_block: int
    num_blocks: int
    layout: KvLayout
    lease_s: float
    key: bytes
    tag_base: int
    #: Messages of which each bundle consists, and blocks of which it does.
    layer_groups: int
    bundle_blocks: int = 1
    digest: str = HOST_DIGEST

    @property
    def groups(self) -> LayerGroups:
        """Which layers each message of a bundle has."""
        return LayerGroups.of(self.layout, self.layer_groups)

    @property
    def bundles(self) -> Bundles:
        """Which blocks travel together."""
        return Bundles(num_blocks=self.num_blocks, size=self.bundle_blocks)

    def tag(self, index: int) -> int:
        """Of the transfer's message `index`, as `LayerGroups` counts them."""
        return self.tag_base + index


def new_tag_base() -> int:
    """Random upper 44 bits: tags of two transfers do not meet."""
    return secrets.randbits(64 - TAG_INDEX_BITS) << TAG_INDEX_BITS


def new_key() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(KEY_BYTES)


def layout_to_proto(layout: KvLayout) -> decode_pb2.KvLayout:
    """As it travels in tickets."""
    return decode_pb2.KvLayout(
        model=layout.model,
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )


def layout_from_proto(message: decode_pb2.KvLayout) -> KvLayout:
    """Raises: RequestError when it is not a layout a worker could have."""
    _require(message.dtype in _DTYPES, f"layout.dtype {message.dtype!r} is not one of {', '.join(_DTYPES)}")
    for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
        value: int = getattr(message, name)
        _require(0 < value <= _MAX_DIMENSION, f"layout.{name} is {value}")
    layout = KvLayout(
        model=message.model,
        dtype=message.dtype,
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
    )
    _require(layout.block_bytes <= MAX_BLOCK_BYTES, f"a block of {layout.block_bytes} bytes is beyond any model")
    return layout


def ticket_to_proto(ticket: Ticket) -> decode_pb2.Ticket:
    """As it travels to the router and the prefill worker."""
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
    )


def ticket_from_proto(message: decode_pb2.Ticket) -> Ticket:
    """Raises: RequestError naming the field that no honest decode worker would have sent."""
    _require(len(message.transfer_id) == TRANSFER_ID_BYTES, f"transfer_id has {len(message.transfer_id)} bytes")
    _require(len(message.key) == KEY_BYTES, f"key has {len(message.key)} bytes")
    _require(0 < message.epoch < 1 << 63, f"epoch is {message.epoch}")
    _require(message.transport in TRANSPORTS, f"transport {message.transport!r} is unknown")
    _require(0 < len(message.data_address) <= MAX_ADDRESS_BYTES, f"data_address has {len(message.data_address)} bytes")
    _require(message.first_block < 1 << 31, f"first_block is {message.first_block}")
    _require(math.isfinite(message.lease_s) and 0 < message.lease_s <= MAX_LEASE_S, f"lease_s is {message.lease_s}")
    _require(message.tag_base % MAX_MESSAGES == 0, f"tag_base {message.tag_base:#x} leaves no room for message numbers")
    _require(bool(message.grpc_address), "grpc_address is empty")
    layout, groups = layout_from_proto(message.layout), message.layer_groups
    _require(1 <= groups <= layout.num_layers, f"layer_groups is {groups}, with a model of {layout.num_layers} layers")
    _require(
        message.num_blocks * groups <= MAX_MESSAGES, f"num_blocks is {message.num_blocks} with {groups} messages each"
    )
    most = max(1, MAX_BLOCK_BYTES // layout.block_bytes)
    _require(1 <= message.bundle_blocks <= most, f"bundle_blocks is {message.bundle_blocks}, not 1 to {most}")
    _require(message.digest in DIGESTS, f"digest {message.digest!r} is not one of {', '.join(DIGESTS)}")
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
        layer_groups=groups,
        bundle_blocks=message.bundle_blocks,
        digest=message.digest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A prefill worker's word that a transfer is complete: what was sent, and the tokens sampled first."""

    request_id: RequestId
    attempt: int
    transfer_id: TransferId
    epoch: Epoch
    digests: tuple[bytes, ...]
    first_tokens: tuple[int, ...]
    mac: bytes

    def require_authentic(self, key: bytes) -> None:
        """Raises: DigestMismatch unless the MAC was made with the ticket's key over exactly these fields."""
        if not same_mac(self.mac, _mac_of(key, self)):
            raise DigestMismatch(f"the commit of request {self.request_id} is not signed with its ticket's key")


def signed_commit(
    ticket: Ticket, *, request_id: RequestId, digests: tuple[bytes, ...], first_tokens: tuple[int, ...]
) -> Commit:
    """The commit for a ticket, with its MAC."""
    bare = Commit(
        request_id=request_id,
        attempt=ticket.attempt,
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        digests=digests,
        first_tokens=first_tokens,
        mac=b"",
    )
    return replace(bare, mac=_mac_of(ticket.key, bare))


def commit_to_proto(commit: Commit) -> decode_pb2.CommitRequest:
    """As it travels to the decode worker."""
    return decode_pb2.CommitRequest(
        ref=common_pb2.RequestRef(request_id=commit.request_id, attempt=commit.attempt),
        transfer_id=commit.transfer_id,
        epoch=commit.epoch,
        digests=commit.digests,
        first_tokens=commit.first_tokens,
        mac=commit.mac,
    )


def commit_from_proto(message: decode_pb2.CommitRequest) -> Commit:
    """Raises: RequestError when a field is out of any honest range."""
    _require(len(message.transfer_id) == TRANSFER_ID_BYTES, f"transfer_id has {len(message.transfer_id)} bytes")
    _require(len(message.mac) == MAC_BYTES, f"mac has {len(message.mac)} bytes")
    _require(0 < message.epoch < 1 << 63, f"epoch is {message.epoch}")
    _require(len(message.digests) <= MAX_MESSAGES, f"there are {len(message.digests)} digests")
    _require(all(len(digest) == DIGEST_BYTES for digest in message.digests), "a digest is not 16 bytes long")
    _require(0 < len(message.first_tokens) <= MAX_FIRST_TOKENS, f"there are {len(message.first_tokens)} first tokens")
    return Commit(
        request_id=RequestId(message.ref.request_id),
        attempt=message.ref.attempt,
        transfer_id=TransferId(message.transfer_id),
        epoch=Epoch(message.epoch),
        digests=tuple(message.digests),
        first_tokens=tuple(message.first_tokens),
        mac=message.mac,
    )


def _mac_of(key: bytes, commit: Commit) -> bytes:
    return commit_mac(
        key,
        transfer_id=commit.transfer_id,
        request_id=commit.request_id,
        attempt=commit.attempt,
        epoch=commit.epoch,
        digests=commit.digests,
        first_tokens=commit.first_tokens,
    )


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise RequestError(f"malformed transfer message: {fault}")
