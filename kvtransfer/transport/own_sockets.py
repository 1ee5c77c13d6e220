"""The TCP sockets of this process, as the kernel lists them: also those that a library opened by itself."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc/self")
_LISTENS = 0x0A
_SOCKET = "socket:["


class Connection(NamedTuple):
    """A TCP connection, the same at both ends, if nothing between them translates addresses. HOST:PORT each."""

    #: The end that connected.
    source: str
    #: The end that listened.
    target: str


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A TCP socket of this process."""

    fd: int
    #: The kernel's number of the socket. A descriptor is used again for another one, this number is not.
    inode: int
    local: str
    remote: str
    listens: bool


def tcp_sockets(proc: Path = _PROC) -> dict[int, TcpSocket]:
    """The sockets by inode number. Empty where the kernel does not list them."""
    own = dict(_own_inodes(proc / "fd"))
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        found.update({each.inode: each for each in parse_table(lines, own)})
    return found


def own_connections(candidates: Iterable[Connection]) -> list[Connection]:
    """Those of these connections that this process has opened."""
    opened = {Connection(each.local, each.remote) for each in tcp_sockets().values() if not each.listens}
    return [each for each in candidates if each in opened]


def parse_table(lines: Iterable[str], own: Mapping[int, int]) -> Iterator[TcpSocket]:
    """The sockets in lines of /proc/net/tcp that are in `own`: descriptors by inode number."""
    for line in lines:
        fields = line.split()
        fd = own.get(int(fields[9]))
        if fd is not None:
            local, remote = _address(fields[1]), _address(fields[2])
            yield TcpSocket(fd, int(fields[9]), local, remote, listens=int(fields[3], 16) == _LISTENS)


def _own_inodes(directory: Path) -> Iterator[tuple[int, int]]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(directory / name)
        except OSError:
            continue  # It was closed meanwhile.
        if target.startswith(_SOCKET):
            yield int(target[len(_SOCKET) : -1]), int(name)


def _address(text: str) -> str:
    """HOST:PORT of an address in the kernel's table, whose words of 32 bits have the order of this machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"
