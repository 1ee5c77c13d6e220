"""The address at which a process takes messages from its own host. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import PeerLost

TOKEN_BYTES = 32
#: What names of sockets end with.
SUFFIX = ".sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAddress:
    """The address of one incarnation of a process."""

    #: Which directory the socket is in, wherever it is mounted: the boot of its host, its device and its inode.
    directory: str
    #: The socket's file name.
    name: str
    #: Required to connect.
    token: bytes

    def pack(self) -> bytes:
        """The address as bytes."""
        return b"\0".join((self.directory.encode(), self.name.encode(), self.token.hex().encode()))

    @classmethod
    def unpack(cls, packed: bytes) -> LocalAddress:
        """The address of such bytes. Raises: PeerLost."""
        try:
            directory, name, token = packed.split(b"\0")
            found = cls(directory=directory.decode(), name=name.decode(), token=bytes.fromhex(token.decode()))
        except ValueError:
            raise PeerLost(f"The local address ({len(packed)} bytes) is none.") from None
        if len(found.token) != TOKEN_BYTES or "/" in found.name or not found.name.endswith(SUFFIX):
            raise PeerLost(f"The local address ({len(packed)} bytes) is none.")
        return found
