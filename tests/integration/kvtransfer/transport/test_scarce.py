"""UCX without files or ports: it is left alone until there are some, and listens again.

The limit is that of a whole process, so each test is a program of its own.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

_TIMEOUT_S = 60.0
_PRELUDE = """
    import asyncio, os, resource, subprocess, sys
    import numpy as np
    from kvtransfer.transport.ucx import UcxTransport
    from pdserve.base.errors import PeerLost, SetupError

    def limit(number):
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def num_open():
        return len(os.listdir("/proc/self/fd")) - 1  # Without that of the listing.

    async def transfer(sender, receiver, tag):
        peer = await sender.connect(await receiver.listen())
        receive = receiver.post_receive(tag, np.zeros(1 << 20, np.uint8))
        async with asyncio.timeout(20):
            await sender.post_send(peer, tag, np.full(1 << 20, tag, np.uint8))
            await receive
        assert (receive.buffer == tag).all()
"""


def _run(program: str) -> None:
    script = f"{textwrap.dedent(_PRELUDE)}\n{textwrap.dedent(program)}\nasyncio.run(main())\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=_TIMEOUT_S)


def test_a_peer_is_refused_while_no_file_is_left_for_it() -> None:
    """UCX makes sockets for a new peer, and ends the process when it gets none."""
    _run("""
        async def main():
            receiver, sender = UcxTransport(), UcxTransport()
            address, _ = await receiver.listen(), await sender.listen()
            before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit(8)  # Less than are open, with those that are kept.
            try:
                await sender.connect(address)
            except PeerLost as error:
                assert "too many open files" in str(error), error
            else:
                raise AssertionError("connected")
            limit(before)
            await transfer(sender, receiver, 1)
    """)


def test_ucx_starts_once_there_are_files() -> None:
    """It is started when a worker needs it, perhaps in a crowd. Nothing of an attempt is left, nor any other error."""
    _run("""
        async def main():
            receiver, sender = UcxTransport(), UcxTransport()
            assert "tcp" in receiver.offered_lanes()
            before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            for num_free in (0, 1, 3, 5, 8, 15):
                open_before = num_open()
                limit(open_before + num_free)
                try:
                    await receiver.listen()
                except SetupError as error:
                    assert "Too many open files" in str(error), error
                else:
                    raise AssertionError(f"started with {num_free} free files")
                limit(before)
                assert num_open() == open_before
            limit(num_open() + 16)
            await receiver.listen()
            limit(before)
            await transfer(sender, receiver, 1)
    """)


def test_a_port_range_without_a_free_port_is_an_error() -> None:
    """UCX would look for a port for ever, within one call. Fails by the timeout if UCX is called."""
    _run("""
        import socket

        async def main():
            taken = socket.create_server(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            os.environ["UCX_TCP_PORT_RANGE"] = f"{port}-{port}"
            receiver = UcxTransport()
            try:
                await receiver.listen()
            except SetupError as error:
                assert "all ports of UCX_TCP_PORT_RANGE are in use at 127.0.0.1" in str(error), error
            else:
                raise AssertionError("started")
            taken.close()
            assert await receiver.listen()
            assert receiver.guard.addresses == {f"127.0.0.1:{port}"}
            await receiver.close()
    """)


def test_ucx_listens_again_after_it_had_no_file_for_a_peer() -> None:
    """UCX closes its listening socket for good when it cannot accept a connection."""
    _run("""
        CLIENT = "import socket, sys; input(); c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); input()"

        async def main():
            receiver, sender = UcxTransport(), UcxTransport()
            old = await receiver.listen()
            await sender.listen()
            [address] = receiver.guard.addresses
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT, address.rpartition(":")[2]], stdin=subprocess.PIPE, text=True
            )
            before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit(num_open())
            client.stdin.write("now\\n")
            client.stdin.flush()
            async with asyncio.timeout(20):
                while receiver.guard.listens:
                    await asyncio.sleep(0.01)
            limit(before)
            assert await receiver.listen() != old
            await transfer(sender, receiver, 1)
            client.communicate("end\\n")
    """)
