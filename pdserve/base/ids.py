"""Ids that cross module boundaries, each with a type of its own."""

from __future__ import annotations

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
#: A router's incarnation: random, new at each start.
RouterId = NewType("RouterId", str)
#: In place of a router's id, in requests that no router sent.
NO_ROUTER = RouterId("")
#: A worker's incarnation: random, new at each start.
Epoch = NewType("Epoch", int)
#: 16 random bytes that identify one transfer.
TransferId = NewType("TransferId", bytes)
#: Index of a block in one worker's pool.
BlockId = NewType("BlockId", int)
#: Block table of a prompt in each KV group of the layout. Blocks that no later token reads may hold something else.
BlockTables = tuple[tuple[BlockId, ...], ...]
#: 16 bytes that identify a block's tokens and all tokens before them.
BlockHash = NewType("BlockHash", bytes)
#: A sequence within one worker: request id, "/", choice index.
SequenceId = NewType("SequenceId", str)


class AttemptId(NamedTuple):
    """An attempt of a request: what an event on a worker is for."""

    request_id: RequestId
    attempt: int


def new_epoch() -> Epoch:
    """A random positive 63-bit number."""
    return Epoch(secrets.randbits(62) + 1)


def new_router_id() -> RouterId:
    """16 random hexadecimal digits."""
    return RouterId(secrets.token_hex(8))


def new_transfer_id() -> TransferId:
    """16 random bytes."""
    return TransferId(secrets.token_bytes(16))


def sequence_id(request_id: RequestId, choice_index: int) -> SequenceId:
    """The id of the sequence of one choice."""
    return SequenceId(f"{request_id}/{choice_index}")
