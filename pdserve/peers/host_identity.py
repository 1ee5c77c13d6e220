"""What decides whether two processes can share memory: their host, namespaces, user and capabilities."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdentity:
    """One process as the kernel of its host sees it. Numbers that could not be read are 0."""

    hostname: str
    #: Random at each boot, and equal in all containers of a host.
    boot_id: str
    #: The process id in the process's own pid namespace.
    pid: int
    uid: int
    gid: int
    #: Effective capabilities, a bit each.
    capabilities: int
    pid_namespace: int
    ipc_namespace: int
    user_namespace: int

    def shares_host_with(self, other: HostIdentity) -> bool:
        """Whether one kernel runs both processes."""
        return bool(self.boot_id) and self.boot_id == other.boot_id


def own_host_identity(proc: Path = _PROC) -> HostIdentity:
    """The identity of this process."""
    return HostIdentity(
        hostname=socket.gethostname(),
        boot_id=_text(proc / "sys/kernel/random/boot_id"),
        pid=os.getpid(),
        uid=os.geteuid(),
        gid=os.getegid(),
        capabilities=_capabilities(proc / "self/status"),
        pid_namespace=_namespace(proc / "self/ns/pid"),
        ipc_namespace=_namespace(proc / "self/ns/ipc"),
        user_namespace=_namespace(proc / "self/ns/user"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _capabilities(status: Path) -> int:
    for line in _text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return int(value.strip(), 16)
    return 0


def _namespace(link: Path) -> int:
    try:
        return link.stat().st_ino
    except OSError:
        return 0
