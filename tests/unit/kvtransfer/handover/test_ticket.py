"""Tickets and commits on the wire, and the refusal of hostile ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.ticket import (
    MAX_MESSAGES,
    Commit,
    Ticket,
    commit_from_proto,
    commit_to_proto,
    new_key,
    signed_commit,
    ticket_from_proto,
    ticket_to_proto,
)
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.errors import DigestMismatch, RequestError
from pdserve.base.host_identity import own_host_identity
from pdserve.base.ids import RequestId
from pdserve.v1 import decode_pb2
from tests.support.handover import LAYOUT, Memory, blocks
from tests.support.tickets import a_ticket


def a_commit(ticket: Ticket) -> Commit:
    return signed_commit(
        ticket, request_id=RequestId("r"), digests=tuple(bytes([i]) * 16 for i in range(5)), first_tokens=(7, 8)
    )


ENDPOINT = DataEndpoint(
    host=own_host_identity(), lanes=("tcp", "cma"), device_memory=True, excluded_paths=frozenset(("cma",))
)


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
def test_a_ticket_survives_the_wire(dtype: str) -> None:
    ticket = replace(a_ticket(), layout=replace(LAYOUT, dtype=dtype))
    wire = ticket_to_proto(ticket).SerializeToString()
    assert ticket_from_proto(decode_pb2.Ticket.FromString(wire)) == ticket


def test_a_ticket_carries_where_its_worker_runs() -> None:
    ticket = replace(a_ticket(), data_endpoint=ENDPOINT)
    wire = ticket_to_proto(ticket).SerializeToString()
    assert ticket_from_proto(decode_pb2.Ticket.FromString(wire)) == ticket


@pytest.mark.parametrize("lanes", [("tcp",) * 65, ("x" * 256,)], ids=["too many", "too long"])
def test_a_ticket_with_absurd_lanes_is_refused(lanes: tuple[str, ...]) -> None:
    ticket = replace(a_ticket(), data_endpoint=replace(ENDPOINT, lanes=lanes))
    with pytest.raises(RequestError, match="data_endpoint"):
        ticket_from_proto(ticket_to_proto(ticket))


def test_a_commit_survives_the_wire() -> None:
    ticket = a_ticket()
    commit = a_commit(ticket)
    wire = commit_to_proto(commit).SerializeToString()
    arrived = commit_from_proto(decode_pb2.CommitRequest.FromString(wire))
    assert arrived == commit
    arrived.require_authentic(ticket.key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer_id", b"short"),
        ("key", b""),
        ("epoch", 0),
        ("epoch", 1 << 63),
        ("transport", "carrier pigeon"),
        ("data_address", b""),
        ("data_address", b"x" * ((1 << 16) + 1)),
        ("bundle_blocks", 0),
        ("bundle_blocks", 1 << 30),
        ("digest", "md5"),
        ("num_blocks", MAX_MESSAGES // 2 + 1),
        ("num_blocks", MAX_MESSAGES + 1),
        ("layer_groups", 0),
        ("layer_groups", LAYOUT.num_layers + 1),
        ("layer_groups", (1 << 32) - 1),
        ("first_block", 1 << 31),
        ("lease_s", 0.0),
        ("lease_s", -1.0),
        ("lease_s", math.inf),
        ("lease_s", math.nan),
        ("lease_s", 1e9),
        ("tag_base", 1),
        ("grpc_address", ""),
    ],
)
def test_a_ticket_with_an_impossible_number_is_refused_by_name(field: str, value: object) -> None:
    message = ticket_to_proto(a_ticket())
    setattr(message, field, value)
    with pytest.raises(RequestError, match=field):
        ticket_from_proto(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int3"), ("block_size", 0), ("num_layers", (1 << 20) + 1), ("head_dim", 0)],
)
def test_a_ticket_with_an_impossible_layout_is_refused_by_name(field: str, value: object) -> None:
    message = ticket_to_proto(a_ticket())
    setattr(message.layout, field, value)
    with pytest.raises(RequestError, match=field):
        ticket_from_proto(message)


def test_a_layout_of_absurd_blocks_is_refused() -> None:
    message = ticket_to_proto(a_ticket())
    message.layout.num_layers = message.layout.head_dim = message.layout.block_size = 1 << 20
    with pytest.raises(RequestError, match="block_bytes of layout"):
        ticket_from_proto(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [("transfer_id", b""), ("mac", b"x"), ("epoch", 0), ("digests", [b"short"]), ("first_tokens", [])],
)
def test_a_malformed_commit_is_refused_by_name(field: str, value: object) -> None:
    message = commit_to_proto(a_commit(a_ticket()))
    message.ClearField(field)  # type: ignore[arg-type]
    if isinstance(value, list):
        getattr(message, field).extend(value)
    else:
        setattr(message, field, value)
    with pytest.raises(RequestError, match=field.rstrip("s").replace("_", ".")):
        commit_from_proto(message)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": RequestId("s")},
        {"attempt": 3},
        {"epoch": 1},
        {"transfer_id": bytes(16)},
        {"first_tokens": (7, 9)},
        {"first_tokens": (7,)},
        {"digests": ()},
        {"digests": (bytes(16),) * 5},
    ],
)
def test_the_mac_covers_every_field_of_a_commit(change: dict[str, object]) -> None:
    ticket = a_ticket()
    forged = replace(a_commit(ticket), **change)  # type: ignore[arg-type]
    with pytest.raises(DigestMismatch):
        forged.require_authentic(ticket.key)


def test_the_mac_needs_the_tickets_key() -> None:
    commit = a_commit(a_ticket())
    with pytest.raises(DigestMismatch):
        commit.require_authentic(new_key())


def test_a_digest_depends_on_every_byte_and_on_the_key() -> None:
    block = Memory(1, 3).block_bytes_view(blocks(0)[0])
    digest, key = MessageDigest(b"k" * 32), MessageDigest(b"l" * 32)
    before = digest(block)
    assert digest(block) == before != key(block)
    for position in (0, block.nbytes // 2, block.nbytes - 1):
        block[position] ^= 1
        assert digest(block) != before
        block[position] ^= 1


def test_tags_of_a_ticket_do_not_leave_its_range() -> None:
    ticket = replace(a_ticket(), tag_base=((1 << 44) - 1) << 20, num_blocks=MAX_MESSAGES // 2)
    assert ticket.tag(MAX_MESSAGES - 1) == (1 << 64) - 1


@pytest.mark.parametrize("address", ["", "unix:/run/x", "dns:///x", "h", "h:", "h:x", "h:70000", "a b:1", "xds:///x:1"])
def test_a_ticket_names_a_host_and_a_port_and_nothing_else_that_grpc_understands(address: str) -> None:
    wire = ticket_to_proto(a_ticket())
    wire.grpc_address = address
    with pytest.raises(RequestError, match="grpc_address"):
        ticket_from_proto(wire)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[::1]:50051", "[fe80::1%eth0]:1", "decode-0.decode_svc:7001"])
def test_a_ticket_names_any_host(address: str) -> None:
    wire = ticket_to_proto(a_ticket())
    wire.grpc_address = address
    assert ticket_from_proto(wire).grpc_address == address


def test_a_ticket_covers_the_last_blocks_of_its_prompt() -> None:
    """A prefill worker would wait for blocks that no prompt has."""
    ticket = a_ticket()
    end = (ticket.first_block + ticket.num_blocks) * ticket.layout.block_size
    ticket.require_end_of(end)
    ticket.require_end_of(end - 1)
    for wrong in (end + 1, end - ticket.layout.block_size):
        with pytest.raises(RequestError, match="ends at block"):
            ticket.require_end_of(wrong)
