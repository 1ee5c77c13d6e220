"""A process that connects with UCX, sends a message and prints the path it takes; run by `test_paths`.

It ends with its input: a message that was sent may still be on its way, and is lost with the connection.

Arguments: the receiver's address and its end of the path, both in hexadecimal.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from kvtransfer.handover.wire_endpoint import endpoint_from_proto
from kvtransfer.transport import open_transport
from kvtransfer.transport.base import LaneReporter
from kvtransfer.transport.memory_access import memory_access
from kvtransfer.transport.path import DataEndpoint, path_between
from pdserve.peers.host_identity import own_host_identity
from pdserve.v1 import decode_pb2

MIB = 1 << 20
PAYLOAD = 7


async def send(address: bytes, other: DataEndpoint) -> None:
    transport = open_transport("ucx")
    await transport.listen()
    assert isinstance(transport, LaneReporter)
    peer = await transport.connect(address)
    own = DataEndpoint(host=own_host_identity(), lanes=transport.offered_lanes())
    path = path_between(own, other, transport.lanes(peer), memory_access(own.host, other.host))
    await transport.post_send(peer, 1, np.full(MIB, PAYLOAD, np.uint8))
    path = path.with_protocol(transport.protocol(peer, device_memory=False))
    assert transport.protocol(peer, device_memory=True) == ""
    # Libraries print to stdout too; the first word marks our line.
    print("path", path.expected, path.actual, path.cause, "|", path.remedy, "|", path.protocol, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    transport.disconnect(peer)
    assert transport.lanes(peer) == ()
    assert transport.protocol(peer, device_memory=False) == ""
    await transport.close()


if __name__ == "__main__":
    end = decode_pb2.DataEndpoint.FromString(bytes.fromhex(sys.argv[2]))
    asyncio.run(send(bytes.fromhex(sys.argv[1]), endpoint_from_proto(end)))
