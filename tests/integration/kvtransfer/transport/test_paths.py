"""The path that UCX really takes between two processes, in and out of namespaces, and the cause when it is TCP."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvtransfer.handover.wire_endpoint import endpoint_to_proto
from kvtransfer.transport import open_transport
from kvtransfer.transport.base import LaneReporter
from kvtransfer.transport.memory_access import memory_access
from kvtransfer.transport.path import DataEndpoint
from pdserve.peers.host_identity import own_host_identity
from tests.integration.kvtransfer.transport.path_sender import MIB, PAYLOAD
from tests.support.deadline import DEADLINE_S

#: Root needs no user namespace of its own to make others.
_UNSHARE = ["unshare"] if os.geteuid() == 0 else ["unshare", "--user", "--map-current-user"]
_SENDER = "tests.integration.kvtransfer.transport.path_sender"
_OTHER_USER = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]


def permitted(*prefix: str) -> list[str]:
    """The prefix of a command line; skips where this machine does not allow it, or the sender cannot read its code."""
    # All that the sender imports, of which some may lie where only its owner looks.
    command = [*prefix, sys.executable, "-c", f"import {_SENDER}"]
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"there is no {prefix[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        pytest.skip(f"this machine does not permit {' '.join(prefix)}: {why}")
    return list(prefix)


async def path_from(*prefix: str) -> str:
    """What a process started with `prefix` prints about its path to this one, which receives a message from it."""
    transport = open_transport("ucx")
    address = await transport.listen()
    assert isinstance(transport, LaneReporter)
    own = DataEndpoint(host=own_host_identity(), lanes=transport.offered_lanes())
    receive = transport.post_receive(1, np.empty(MIB, np.uint8))
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", _SENDER),
        *(address.hex(), endpoint_to_proto(own).SerializeToString().hex()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await receive
            assert (receive.buffer == PAYLOAD).all()
            output, _ = await process.communicate(b"")  # Ends the input, and with it the process.
        assert process.returncode == 0
        [line] = [line for line in output.decode().splitlines() if line.startswith("path ")]
        return line.removeprefix("path ")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await transport.close()


async def test_two_processes_of_a_host_read_each_others_memory() -> None:
    own = own_host_identity()
    if memory_access(own, own).own:
        pytest.skip("the kernel refuses process_vm_readv here")
    assert await path_from() == "cma cma  |  | rendezvous zero-copy read from remote"


@pytest.mark.parametrize(("flags", "kind"), [(["--ipc"], "IPC"), (["--pid", "--fork", "--mount-proc"], "pid")])
async def test_another_namespace_means_tcp_and_is_named(flags: list[str], kind: str) -> None:
    path = await path_from(*permitted(*_UNSHARE, *flags))
    assert path.startswith(f"cma tcp the workers are in different {kind} namespaces | Put both into one.")


async def test_another_user_means_tcp_and_is_named() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start a process of another user")
    path = await path_from(*permitted(*_OTHER_USER))
    assert path.startswith("cma tcp the workers run as different users (12345:12345 and 0:0) | ")


async def test_a_transport_list_without_cma_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    path = await path_from()
    assert path.startswith("cma tcp UCX offers no cma on this worker and the peer | Unset UCX_TLS")
    assert path.rpartition(" | ")[2].startswith("rendezvous")
    assert "zero-copy" not in path
