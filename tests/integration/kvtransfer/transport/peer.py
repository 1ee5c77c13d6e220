"""A second process with its own transport, which takes commands line by line; run by `conftest.start_peer`.

Every command is answered by one line. Payloads derive from their tag, so that both sides know them. Buffers are on
the device named after the transport, if any.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from kvtransfer.transport import Operation, open_transport
from tests.integration.kvtransfer.memory import Memory, payload_of


async def serve(transport_name: str, device: str | None) -> None:
    transport, memory = open_transport(transport_name, device=device), Memory(device)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    receives: dict[int, Operation] = {}
    sends: list[Operation] = []
    peers = {}
    _answer((await transport.listen()).hex())
    while line := (await reader.readline()).decode().split():
        match line:
            case ["receive", tag, size]:
                receives[int(tag)] = transport.post_receive(int(tag), memory.empty(int(size)))
                _answer("posted")
            case ["await", tag]:
                receive = receives.pop(int(tag))
                await receive
                right = np.array_equal(memory.read(receive.buffer), payload_of(int(tag), receive.buffer.nbytes))
                _answer("right" if right else "wrong")
            case ["send", address, first, count, size]:
                if address not in peers:
                    peers[address] = await transport.connect(bytes.fromhex(address))
                tags = range(int(first), int(first) + int(count))
                sends.extend(transport.post_send(peers[address], tag, memory.payload(tag, int(size))) for tag in tags)
                _answer("sending")
            case ["flush"]:
                for send in sends:
                    await send
                sends.clear()
                _answer("flushed")
    await transport.close()


def _answer(text: str) -> None:
    print("answer", text, flush=True)  # Libraries print to stdout too; the first word marks our lines.


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
