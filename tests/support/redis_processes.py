"""Redis servers of several kinds for tests: with users, behind TLS, replicated with Sentinels, and as a cluster."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.free_ports import free_port
from pdserve.cli.private_redis import find_redis_server, wait_until_ready
from pdserve.redis.store import Store
from tests.support.redis import eventually

NUM_SLOTS = 16_384
#: A node of a cluster listens to the others at its own port plus this.
_BUS_OFFSET = 10_000


@dataclass(frozen=True, slots=True)
class Server:
    """A running redis-server or Sentinel."""

    port: int
    process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def redis_process(directory: Path, *arguments: str) -> AsyncIterator[Server]:
    """A server with these arguments of redis-server and no data; it is killed at the end."""
    port = free_port(_BUS_OFFSET)
    home = directory / str(port)
    home.mkdir()
    base = [str(find_redis_server()), *(item for item in arguments if item.endswith(".conf"))]
    base += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", "", "--appendonly", "no"]
    base += ["--loglevel", "warning"]
    command = [*base, *(item for item in arguments if not item.endswith(".conf"))]
    # Its warnings stand in the report of a test that fails: why it does not start, for example.
    process = await asyncio.create_subprocess_exec(*command)
    server = Server(port, process)
    try:
        await wait_until_ready(server.url, has_ended=lambda: process.returncode is not None)
        yield server
    finally:
        await server.kill()


def path_with_redis_server(directory: Path) -> str:
    """The value of PATH with the server in front, under the name by which commands in images start it."""
    link = directory / "redis-bin" / "redis-server"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(find_redis_server())
    return f"{link.parent}{os.pathsep}{os.environ['PATH']}"


@asynccontextmanager
async def tls_proxy(directory: Path, server: Server) -> AsyncIterator[str]:
    """A port that speaks TLS in front of the server. Yields its URL, which names the certificate to trust."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, to_server[1]))
            group.create_task(_copy(to_server[0], writer))

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    async with proxy:
        yield f"rediss://127.0.0.1:{proxy.sockets[0].getsockname()[1]}?ssl_ca_certs={certificate}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Replicated:
    """A master, its replica, and the Sentinel that replaces the one by the other."""

    master: Server
    replica: Server
    sentinel: Server

    @property
    def url(self) -> str:
        """A Sentinel that does not exist comes first."""
        return f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel.port}/primary"


@asynccontextmanager
async def replicated(directory: Path) -> AsyncIterator[Replicated]:
    """A master and a replica in step, watched by one Sentinel that notices a loss after half a second."""
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(redis_process(directory, "--repl-diskless-sync-delay", "0"))
        replica = await stack.enter_async_context(
            redis_process(directory, "--replicaof", "127.0.0.1", str(master.port))
        )
        config = directory / "sentinel.conf"
        lines = [f"sentinel monitor primary 127.0.0.1 {master.port} 1"]
        lines += ["sentinel down-after-milliseconds primary 500", "sentinel failover-timeout primary 2000"]
        config.write_text("\n".join(lines) + "\n")
        sentinel = await stack.enter_async_context(redis_process(directory, str(config), "--sentinel"))
        async with Store(replica.url) as store, Store(sentinel.url) as watcher:
            await eventually(lambda: _contains(store, ("INFO", "replication"), b"master_link_status:up"))
            await eventually(lambda: _contains(watcher, ("INFO", "sentinel"), b"slaves=1"))
        yield Replicated(master, replica, sentinel)


@asynccontextmanager
async def redis_cluster(directory: Path) -> AsyncIterator[list[Server]]:
    """Two nodes, with the first and the second half of the hash slots."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(redis_process(directory, "--cluster-enabled", "yes")) for _ in "ab"]
        for index, node in enumerate(nodes):
            async with Store(node.url, timeout_s=5) as store:
                half = NUM_SLOTS // 2
                await store.call("CLUSTER", "ADDSLOTS", *range(index * half, (index + 1) * half))
                await store.call("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            async with Store(node.url) as store:
                await eventually(lambda store=store: _contains(store, ("CLUSTER", "INFO"), b"cluster_state:ok"))
        yield nodes


async def _contains(store: Store, command: Sequence[str], text: bytes) -> bool:
    reply = await store.call(*command)
    assert isinstance(reply, bytes)
    return text in reply
