"""The TCP sockets of this process: also those that a library opened by itself."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

_PROC = Path("/proc/self")
#: The kernel's numbers of a TCP connection's states.
_CONNECTING, _LISTENS = 2, 10


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
    #: Empty without a connection.
    remote: str
    listens: bool


def tcp_sockets() -> dict[int, TcpSocket]:
    """The sockets by inode number. Empty where /proc is missing."""
    found = {}
    connecting = []
    for fd in _descriptors():
        seen = _looked_at(fd)
        if seen is not None:
            each, state = seen
            found[each.inode] = each
            if state == _CONNECTING:
                connecting.append(each.inode)
    # The call for the other end's address fails while a connection is being made. The kernel's table has it, which
    # takes milliseconds to read.
    for inode, remote in _remotes(connecting).items() if connecting else ():
        found[inode] = replace(found[inode], remote=remote)
    return found


def own_connections(candidates: Iterable[Connection]) -> list[Connection]:
    """Those of these connections that this process has opened."""
    opened = {Connection(each.local, each.remote) for each in tcp_sockets().values() if not each.listens}
    return [each for each in candidates if each in opened]


def _descriptors() -> Iterator[int]:
    with suppress(OSError):
        yield from map(int, os.listdir(_PROC / "fd"))


def _looked_at(fd: int) -> tuple[TcpSocket, int] | None:
    """The TCP socket of a descriptor and its state; None for anything else, and if it was closed meanwhile."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        with duplicate(fd) as each:
            if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
                return None
            state = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            local, remote = _text(each.getsockname()), ""
            with suppress(OSError):
                remote = _text(each.getpeername())
            return TcpSocket(fd, os.fstat(each.fileno()).st_ino, local, remote, listens=state == _LISTENS), state
    except OSError:
        return None


def is_open(fd: int, inode: int) -> bool:
    """Whether a descriptor still is that of the socket with this inode number."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def occupy(fd: int) -> None:
    """Opens something under this number for good, unless it is in use."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The lowest free number from this one on, in one step: other threads open files, too.
        opened = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, fd)
    finally:
        os.close(null)
    if opened != fd:
        os.close(opened)


def duplicate(fd: int) -> socket.socket:
    """Another handle of the socket of a descriptor; making it changes nothing. Raises: OSError when there is none."""
    descriptor = os.dup(fd)
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _remotes(inodes: Collection[int]) -> dict[int, str]:
    found = dict[int, str]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            found.update(remotes_in((_PROC / "net" / table).read_text().splitlines()[1:], inodes))
    return found


def remotes_in(lines: Iterable[str], inodes: Collection[int]) -> Iterator[tuple[int, str]]:
    """Inode number and other end of these sockets, from lines of /proc/net/tcp."""
    for line in lines:
        fields = line.split()
        if int(fields[9]) in inodes:
            host, _, port = fields[2].partition(":")
            # Words of 32 bits, in the order of this machine.
            words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
            packed = struct.pack(f"={len(words)}I", *words)
            family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
            yield int(fields[9]), _text((socket.inet_ntop(family, packed), int(port, 16)))


def _text(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
