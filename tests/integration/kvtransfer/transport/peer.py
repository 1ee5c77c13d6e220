"""A second process with its own transport, which takes commands line by line; run by `start_peer`.

Every command is answered by one line. Payloads derive from their tag, so that both sides know them. Buffers are on
the device named after the transport, if any.
"""

from __future__ import annotations

import numpy as np

from kvtransfer.transport import Operation
from tests.integration.kvtransfer.memory import Memory, payload_of
from tests.integration.kvtransfer.opening import open_any
from tests.integration.kvtransfer.processes import CommandLine


async def main(commands: CommandLine, transport_name: str, device: str | None = None) -> None:
    """Serves until the first process ends."""
    transport, memory = open_any(transport_name, device=device), Memory(device)
    receives: dict[int, Operation] = {}
    sends: list[Operation] = []
    peers = {}
    commands.answer((await transport.listen()).hex())
    while command := await commands.next():
        match command:
            case ["receive", tag, size]:
                receives[int(tag)] = transport.post_receive(int(tag), memory.empty(int(size)))
                commands.answer("posted")
            case ["await", tag]:
                receive = receives.pop(int(tag))
                await receive
                right = np.array_equal(memory.read(receive.buffer), payload_of(int(tag), receive.buffer.nbytes))
                commands.answer("right" if right else "wrong")
            case ["send", address, first, count, size]:
                if address not in peers:
                    peers[address] = await transport.connect(bytes.fromhex(address))
                tags = range(int(first), int(first) + int(count))
                sends.extend(transport.post_send(peers[address], tag, memory.payload(tag, int(size))) for tag in tags)
                commands.answer("sending")
            case ["flush"]:
                for send in sends:
                    await send
                sends.clear()
                commands.answer("flushed")
    await transport.close()
