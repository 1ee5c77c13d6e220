"""Hosts of a test's own: network namespaces on one Ethernet segment, which can be cut apart. They need root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_NETWORK = "10.203.0"
#: The address of no interface: frames to it are dropped wherever they arrive.
_UNKNOWN_MAC = "02:00:00:00:00:01"
_CLONE_NEWNET = 0x40000000


class Hosts:
    """Hosts by name. All reach each other until they are cut apart."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=1)}

    def address(self, name: str) -> str:
        """The IPv4 address of a host."""
        return f"{_NETWORK}.{self._numbers[name]}"

    def command(self, name: str) -> tuple[str, ...]:
        """Words in front of a command that runs on this host."""
        return ("nsenter", f"--net={_path(_namespace(name))}")

    @contextmanager
    def cut(self, *ways: tuple[str, str]) -> Iterator[None]:
        """What the first host of each pair sends to the second is lost meanwhile, without an error at either."""
        with ExitStack() as stack:
            for source, destination in ways:
                namespace, address = _namespace(source), self.address(destination)
                entry = (address, "lladdr", _UNKNOWN_MAC, "dev", "eth0", "nud", "permanent")
                _ip("-n", namespace, "neigh", "replace", *entry)
                stack.callback(_ip, "-n", namespace, "neigh", "del", address, "dev", "eth0")
            yield

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """This thread is on the host: its sockets, and what it starts, processes and threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/thread-self/ns/net").open("rb") as before, _path(_namespace(name)).open("rb") as there:
            _enter(libc, there.fileno())
            try:
                yield
            finally:
                _enter(libc, before.fileno())


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns into a network namespace failed")


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Makes the hosts, and removes them at the end. Skips the test where this machine does not permit it."""
    with ExitStack() as stack:
        _skip_unless_permitted()
        switch = stack.enter_context(_made("switch"))
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        made = Hosts(names)
        for name in names:
            namespace, port = stack.enter_context(_made(name)), f"to-{name}"[:15]
            _ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{made.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", device, "up")
        yield made


def _skip_unless_permitted() -> None:
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("needs the commands ip and nsenter")
    probe = ("unshare", "--net", "ip", "link", "add", "probe", "type", "bridge")
    if os.geteuid() != 0 or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not permit network namespaces with a bridge")


@contextmanager
def _made(name: str) -> Iterator[str]:
    namespace = _namespace(name)
    _ip("netns", "add", namespace)
    try:
        yield namespace
    finally:
        _ip("netns", "delete", namespace)


def _namespace(name: str) -> str:
    return f"pdserve-{os.getpid()}-{name}"


def _path(namespace: str) -> Path:
    return Path("/run/netns") / namespace


def _ip(*words: str) -> None:
    found = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"ip {' '.join(words)}: {found.stderr.strip()}"
