"""A stranger at a port of UCX. It is a process of its own: the connections of this one are the own ones of a worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Connects, sends, and reports its own port. Then it reports, for each line, the bytes that were not taken.
_CODE = """
import fcntl, socket, struct, sys
address, data = sys.argv[1], bytes.fromhex(sys.argv[2])
host, _, port = address.rpartition(":")
connection = socket.create_connection((host, int(port)), timeout=30)
connection.sendall(data)
print(connection.getsockname()[1], flush=True)
for line in sys.stdin:
    print(struct.unpack("i", fcntl.ioctl(connection, 0x5411, b"0000"))[0], flush=True)
"""


class Stranger:
    """One connection of another process, over which bytes were sent."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        #: Its end of the connection.
        self.address = f"127.0.0.1:{self._answer()}"

    @property
    def num_unread(self) -> int:
        """Bytes that the other end's kernel has not taken."""
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@contextmanager
def stranger_at(address: str, data: bytes) -> Iterator[Stranger]:
    """A stranger that has sent this; its connection stays open until the block ends."""
    command = [sys.executable, "-I", "-S", "-c", _CODE, address, data.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Stranger(process)
        finally:
            process.kill()
