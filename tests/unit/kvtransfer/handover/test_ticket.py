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
from pdserve.base.ids import Epoch, RequestId, TransferId
from pdserve.peers.host_identity import own_host_identity
from pdserve.v1 import decode_pb2
from tests.support.groups import TWO_GROUPS
from tests.support.handover import LAYOUT, Memory
from tests.support.tickets import a_ticket


def a_commit(ticket: Ticket) -> Commit:
    return signed_commit(
        ticket, request_id=RequestId("r"), digests=tuple(bytes([i]) * 16 for i in range(5)), first_tokens=(7, 8)
    )


ENDPOINT = DataEndpoint(
    host=own_host_identity(),
    lanes=("tcp", "cma"),
    device_memory=True,
    excluded_paths=frozenset(("cma",)),
    gpu="GPU-1",
    readable_gpus=frozenset(("GPU-1", "GPU-2")),
    pins_host_memory=True,
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
    block = Memory(1, 3).blocks[0]
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


def test_a_ticket_and_a_commit_for_one_kv_group_have_the_bytes_that_they_had_before_there_were_groups() -> None:
    """Recorded with the last version without groups: workers of both versions hand over to one another."""
    ticket = replace(
        a_ticket(),
        transfer_id=TransferId(bytes(range(16))),
        epoch=Epoch(7),
        key=bytes(range(32)),
        tag_base=5 << 20,
    )
    assert ticket_to_proto(ticket).SerializeToString(deterministic=True).hex() == (
        "0a10000102030405060708090a0b0c0d0e0f10021a02643020072a0b3132372e302e302e313a3132037563783a09736f6d6577686572"
        "654003480552140a016d1207666c6f6174333218042004280130045900000000000034406220000102030405060708090a0b0c0d0e0f"
        "101112131415161718191a1b1c1d1e1f688080c002700278028201026e68"
    )
    commit = signed_commit(
        ticket, request_id=RequestId("r"), digests=(bytes([0]) * 16, bytes([1]) * 16), first_tokens=(7, 8)
    )
    assert commit_to_proto(commit).SerializeToString(deterministic=True).hex() == (
        "0a050a017210021210000102030405060708090a0b0c0d0e0f1807221000000000000000000000000000000000221001010101010101"
        "0101010101010101012a02070832203ca6657ebdb2fa7814a621af437c492841687c327015e8be0863091ee6c8c74b"
    )


#: A prompt of 12 tokens, 3 blocks. The token behind it reads from token 7 on in the windowed group: from block 1 on.
GROUPED = replace(a_ticket(), layout=TWO_GROUPS, first_block=0, num_blocks=3, other_first_blocks=(1,))


def test_a_ticket_for_two_kv_groups_survives_the_wire_and_ends_both_with_the_prompt() -> None:
    wire = ticket_to_proto(GROUPED).SerializeToString()
    assert ticket_from_proto(decode_pb2.Ticket.FromString(wire)) == GROUPED
    assert [segment.num_blocks for segment in GROUPED.shape.segments] == [3, 2]
    GROUPED.require_end_of(12)
    GROUPED.require_end_of(11)


@pytest.mark.parametrize("first_blocks", [(), (1, 1), (4,), ((1 << 32) - 1,)])
def test_a_ticket_with_impossible_blocks_of_another_kv_group_is_refused(first_blocks: tuple[int, ...]) -> None:
    message = ticket_to_proto(GROUPED)
    message.other_first_blocks[:] = first_blocks
    with pytest.raises(RequestError, match="other_first_blocks"):
        ticket_from_proto(message)


def test_a_ticket_for_one_kv_group_names_no_other() -> None:
    message = ticket_to_proto(a_ticket())
    message.other_first_blocks[:] = (0,)
    with pytest.raises(RequestError, match="number of other_first_blocks is 1, not 0 to 0"):
        ticket_from_proto(message)


def test_the_blocks_of_all_kv_groups_are_within_the_limit_of_messages() -> None:
    message = ticket_to_proto(GROUPED)
    message.num_blocks = MAX_MESSAGES // message.layer_groups
    message.other_first_blocks[:] = (1,)
    with pytest.raises(RequestError, match="blocks of all KV groups"):
        ticket_from_proto(message)


def test_a_ticket_for_blocks_behind_a_window_is_refused() -> None:
    """The prefill worker may have given them to another request."""
    with pytest.raises(RequestError, match="starts at block 0 in KV group 1, before block 1"):
        replace(GROUPED, other_first_blocks=(0,)).require_end_of(12)
    replace(GROUPED, num_blocks=2, other_first_blocks=(0,)).require_end_of(8)
