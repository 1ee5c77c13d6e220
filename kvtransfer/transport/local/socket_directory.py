"""The directory of the sockets at which this user's processes take messages from their own host."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from kvtransfer.transport.local.address import SUFFIX, TOKEN_BYTES, LocalAddress
from pdserve.base.errors import PeerLost, SetupError
from pdserve.peers.host_identity import own_host_identity

_NAME_BYTES = 8
_CREDENTIALS = struct.Struct("3i")


class SocketDirectory:
    """A directory of this user's sockets."""

    def __init__(self, path: Path, *, is_required: bool = True) -> None:
        """Creates it if need be. `is_required`: a process that cannot listen there does not start.

        Raises: SetupError.
        """
        self.path = path
        self.is_required = is_required
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
        except OSError as error:
            raise SetupError(f"The directory for local sockets cannot be used: {error}.") from error
        if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o002:
            raise SetupError(f"The directory for local sockets, {path}, belongs to another user, or anybody may write.")
        boot_id = own_host_identity().boot_id
        #: Equal in all processes that see this directory, wherever it is mounted.
        self.identity = f"{boot_id}:{found.st_dev}:{found.st_ino}"
        #: What names of this host's sockets begin with: others may see a directory, too.
        self._prefix = f"{boot_id[:8]}-"

    def listen(self) -> tuple[socket.socket, LocalAddress]:
        """A socket that accepts connections. Removes those of processes that have ended. Raises: SetupError."""
        self._sweep()
        path = self.path / f"{self._prefix}{secrets.token_hex(_NAME_BYTES)}{SUFFIX}"
        # Under another name until it listens, so that nobody takes it for that of a process that has ended. It is a
        # longer one, so that a path that is too long is found here.
        binding = path.with_name(f"{path.name}.new")
        try:
            listener = _new_socket()
            try:
                listener.bind(str(binding))
                listener.listen()
                binding.rename(path)
            except OSError:
                listener.close()
                binding.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise SetupError(f"No local socket can be made in {self.path}: {error}.") from error
        return listener, LocalAddress(directory=self.identity, name=path.name, token=secrets.token_bytes(TOKEN_BYTES))

    def remove(self, address: LocalAddress) -> None:
        """The address is nobody's from now on."""
        with suppress(OSError):
            (self.path / address.name).unlink(missing_ok=True)

    def connect(self, address: LocalAddress) -> socket.socket:
        """A socket that is connected to a process of this user. Raises: PeerLost."""
        if address.directory != self.identity:
            raise PeerLost("The peer's local socket is in another directory.")
        try:
            connected = _new_socket()
            try:
                connected.connect(str(self.path / address.name))
                _require_own_user(connected)
            except BaseException:
                connected.close()
                raise
        except OSError as error:
            raise PeerLost(f"The peer's local socket cannot be connected to: {error}.") from error
        return connected

    def _sweep(self) -> None:
        for path in self.path.glob(f"{self._prefix}*{SUFFIX}"):
            with suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode) and _has_ended(path):
                    path.unlink(missing_ok=True)


def user_of(connected: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _require_own_user(connected: socket.socket) -> None:
    """The memory of this process is shown to nobody else. Raises: PeerLost."""
    if (user := user_of(connected)) not in (os.geteuid(), 0):
        raise PeerLost(f"The process at the peer's local socket is one of user {user}.")


def _has_ended(path: Path) -> bool:
    with _new_socket() as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made
