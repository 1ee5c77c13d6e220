"""The directory of the sockets at which this user's processes take messages from their own host."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

from kvtransfer.transport.local.address import SUFFIX, LocalAddress
from kvtransfer.transport.local.packets import TOKEN_BYTES
from pdserve.base.errors import PeerLost, SetupError
from pdserve.peers.host_identity import own_host_identity

_NAME_BYTES = 8


class SocketDirectory:
    """A directory of this user's sockets."""

    def __init__(self, path: Path) -> None:
        """Creates it if need be. Raises: SetupError."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
        except OSError as error:
            raise SetupError(f"The directory for local sockets cannot be used: {error}.") from error
        if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o002:
            raise SetupError(f"The directory for local sockets, {path}, belongs to another user, or anybody may write.")
        #: Equal in all processes that see this directory, wherever it is mounted.
        self.identity = f"{own_host_identity().boot_id}:{found.st_dev}:{found.st_ino}"

    def listen(self) -> tuple[socket.socket, LocalAddress]:
        """A socket that accepts connections. Removes those of processes that have ended. Raises: SetupError."""
        self._sweep()
        name = secrets.token_hex(_NAME_BYTES) + SUFFIX
        listener = _new_socket()
        try:
            listener.bind(str(self.path / name))
            listener.listen()
        except OSError as error:
            listener.close()
            raise SetupError(f"No local socket can be made in {self.path}: {error}.") from error
        return listener, LocalAddress(directory=self.identity, name=name, token=secrets.token_bytes(TOKEN_BYTES))

    def remove(self, address: LocalAddress) -> None:
        """The address is nobody's from now on."""
        (self.path / address.name).unlink(missing_ok=True)

    def connect(self, address: LocalAddress) -> socket.socket:
        """A socket that is connected to a process of this user. Raises: PeerLost."""
        if address.directory != self.identity:
            raise PeerLost("The peer's local socket is in another directory.")
        connected = _new_socket()
        try:
            connected.connect(str(self.path / address.name))
        except OSError as error:
            connected.close()
            raise PeerLost(f"The peer's local socket cannot be connected to: {error}.") from error
        return connected

    def _sweep(self) -> None:
        for path in self.path.glob(f"*{SUFFIX}"):
            with _new_socket() as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:  # Its process has ended without removing it.
                    path.unlink(missing_ok=True)
                except OSError:
                    continue


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made
