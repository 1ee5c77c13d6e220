"""Messages of UCX's own protocol over TCP, as a stranger can make them: no secret is needed for any of them."""

from __future__ import annotations

import random
import socket
import struct

#: What a UCX 1.21 sent on a new connection: the first bytes of every connection, and a request to connect.
CONNECT = bytes.fromhex("78563412bebafeca201d000000010000000000000000000000000200e1977f0000010000000000000000")
MAGIC = CONNECT[:8]
#: Kinds of messages: below `CONNECTS` those of transports above, and then UCX's own for TCP.
CONNECTS, PUTS, PUT_DONE, LIVES = 32, 33, 34, 35
#: Those of the protocol above: wireup, tags (eager and rendezvous), remote memory access, atomics, active messages.
NUM_KINDS = 36


def message(kind: int, body: bytes) -> bytes:
    """A message of this kind."""
    return struct.pack("<BI", kind, len(body)) + body


def put(address: int, data: bytes) -> bytes:
    """A message that has the receiver write data to an address of its memory."""
    return message(PUTS, struct.pack("<QQI", address, len(data), 1)) + data


def connect_from(port: int) -> bytes:
    """A valid request to connect that names another port of this host as its own."""
    return CONNECT.replace(b"\x02\x00\xe1\x97", struct.pack("<H", socket.AF_INET) + struct.pack(">H", port))


def mutants(seed: int, count: int) -> list[bytes]:
    """What strangers send on connections: a valid beginning, then messages of all kinds with changed bytes."""
    noise = random.Random(seed)
    made = []
    for number in range(count):
        body = noise.randbytes(noise.choice((0, 1, 8, 20, 64, 300)))
        valid = (message(number % NUM_KINDS, body), put(noise.choice((0, 16, 1 << 40)), body), connect_from(9)[8:])
        data = bytearray(noise.choice(valid))
        for _ in range(noise.choice((0, 1, 3))):
            data[noise.randrange(len(data))] = noise.randrange(256)
        begin = (CONNECT, CONNECT, connect_from(noise.randrange(1, 1 << 16)), MAGIC)[number % 4]
        made.append(begin + bytes(data) + noise.choice((b"", noise.randbytes(40))))
    return made
