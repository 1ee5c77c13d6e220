"""Second processes that take commands. They are forked from a server that has imported torch, which takes seconds."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import socket
from collections.abc import Sequence
from typing import Self

_CONTEXT = multiprocessing.get_context("forkserver")
#: Not `ucxx`: a UCX library belongs to one process.
_PRELOADED = ["kvtransfer.transport.torch_distributed.transport", "tests.integration.kvtransfer.handover.worker"]
if "PDSERVE_TEST_GPU" in os.environ:
    _PRELOADED.append("tests.integration.kvtransfer.handover.gpu_worker")
_CONTEXT.set_forkserver_preload(_PRELOADED)
#: Commands and answers are lines; a ticket is a long one.
_LONGEST_LINE = 1 << 20


class CommandLine:
    """The second process's end: lines of words in, lines of text out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> Self:
        """Over a connected socket, which it closes with the process."""
        return cls(*await asyncio.open_connection(sock=end, limit=_LONGEST_LINE))

    async def next(self) -> list[str]:
        """The next command's words; none when the first process has ended."""
        return (await self._reader.readline()).decode().split()

    def answer(self, text: str) -> None:
        """Writes a line."""
        self._writer.write(f"{text}\n".encode())


class RemotePeer:
    """The first process's view of the second, which runs `main(commands, *arguments)` of a module here."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self.address = b""
        self._socket, theirs = socket.socketpair()
        self._process = _CONTEXT.Process(target=_run, args=(module, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """Call this before any other method."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_LONGEST_LINE)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def command(self, command: str) -> str:
        """Sends a command and returns its answer."""
        self.say(command)
        return await self.answer()

    def say(self, command: str) -> None:
        assert self._writer is not None
        self._writer.write(command.encode() + b"\n")

    async def answer(self) -> str:
        """The next line. Raises EOFError when the process has ended."""
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except ConnectionResetError:
            line = b""
        if not line:
            raise EOFError("the peer process ended")
        return line.decode().strip()

    async def kill(self) -> None:
        """Sends SIGKILL: the process cannot clean up."""
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    def close(self) -> None:
        """Closes our end; the process has been killed."""
        if self._writer is not None:
            self._writer.close()
        self._process.close()


def _run(module: str, end: socket.socket, *arguments: str) -> None:
    asyncio.run(_serve(module, end, arguments))


async def _serve(module: str, end: socket.socket, arguments: tuple[str, ...]) -> None:
    commands = await CommandLine.open(end)
    await importlib.import_module(f"tests.integration.kvtransfer.{module}").main(commands, *arguments)
