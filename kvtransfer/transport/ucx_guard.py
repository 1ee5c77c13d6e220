"""The guard of a UCX worker: the kernel drops what strangers send to its TCP sockets, before UCX can read it.

UCX has no authentication, and one of its messages writes to an address that the sender chooses. Its sockets therefore
get a filter that drops every segment with data. Connections that UCX accepts inherit it from the listening socket. The
filter is taken off one connection at a time, when a peer of this cluster has named it as its own (decision 38). From
then on the connection is an ordinary one, at no cost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator

from kvtransfer.transport.own_sockets import Connection, TcpSocket, is_open, occupy, tcp_sockets
from kvtransfer.transport.socket_filter import end, is_shut, open_to_data, shut
from pdserve.base.errors import PeerLost, SetupError

#: Time for which UCX is not polled while a new connection is named to its other end.
_PAUSE_S = 0.05
#: Time within which a connection that was named must have arrived, and the first and longest pause between two looks.
_ARRIVAL_S, _LOOK_S, _MAX_LOOK_S = 5.0, 0.002, 0.1
#: Time for which a connection may be unnamed; at most twice that.
_NAMED_WITHIN_S = 5.0


class UcxGuard:
    """Guards the TCP sockets of one UCX worker. A guard that is not active changes nothing."""

    def __init__(self, *, is_active: bool, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """`pause` and `resume`: stop and continue polling UCX."""
        self._is_active = is_active
        self._pause, self._resume = pause, resume
        self._introductions = 0
        self._addresses: frozenset[str] = frozenset()
        #: Inode numbers of the listening sockets by descriptor.
        self._listeners: dict[int, int] = {}
        #: Connections of this worker to others that the guard has seen, by inode number.
        self._outgoing: set[int] = set()

    @property
    def is_active(self) -> bool:
        """Whether strangers are kept out of UCX."""
        return self._is_active

    @property
    def addresses(self) -> frozenset[str]:
        """The TCP addresses at which UCX listens."""
        return self._addresses

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Finds the sockets at which UCX starts to listen within the block. An active guard lets no data into them.

        Raises: SetupError when the kernel refuses filters.
        """
        before = tcp_sockets()
        yield
        opened = [each for inode, each in tcp_sockets().items() if inode not in before]
        listeners = [each for each in opened if each.listens]
        self._addresses = frozenset(each.local for each in listeners)
        self._listeners = {each.fd: each.inode for each in listeners}
        if self._is_active:
            # Others of this process may open sockets at this moment, too: those stay as they are.
            for each in (*listeners, *(each for each in tcp_sockets().values() if not each.listens)):
                if each.local in self._addresses:
                    shut(each)

    @property
    def listens(self) -> bool:
        """Whether UCX still listens. It closes a listening socket for good when it gets no file for a connection."""
        return all(is_open(fd, inode) for fd, inode in self._listeners.items())

    def occupy_closed(self) -> None:
        """Keeps the descriptors of sockets that UCX has closed by itself: it could not listen at one of them again.

        It forgets to remove its handler for such a socket, and refuses a second one with the same number.
        """
        for fd, inode in self._listeners.items():
            if not is_open(fd, inode):
                occupy(fd)

    def require_found(self, lanes: Collection[str]) -> None:
        """Raises: SetupError when UCX has TCP among its lanes, and where it listens could not be found out."""
        if self._is_active and "tcp" in lanes and not self._addresses:
            raise SetupError(
                "The TCP sockets of UCX are not in /proc/self/net/tcp, so strangers cannot be kept out. Use "
                "--guard-transport off, and let only workers reach its ports."
            )

    @contextlib.contextmanager
    def introducing(self, targets: Collection[str]) -> Iterator[list[Connection]]:
        """The new connections of this worker to these addresses. No data is let into them until they are confirmed.

        UCX is not polled meanwhile. It would send at once, the other end would drop that, and the kernel sends it again
        after 200 ms. It is polled again after 50 ms in any case, for the sake of other peers.
        """
        connections = self._outgoing_to(targets)
        loop = asyncio.get_running_loop()
        self._introductions += 1
        self._pause()
        ended = False

        def continue_polling() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._introductions -= 1
                if not self._introductions:
                    self._resume()

        timer = loop.call_later(_PAUSE_S, continue_polling)
        try:
            yield connections
        finally:
            timer.cancel()
            continue_polling()

    def _outgoing_to(self, targets: Collection[str]) -> list[Connection]:
        found = [each for each in tcp_sockets().values() if each.remote in targets and not each.listens]
        # An older one may have ended at the other end, which would wait for it in vain.
        new = [each for each in found if each.inode not in self._outgoing]
        if self._is_active:
            for each in new:
                shut(each)
        self._outgoing.update(each.inode for each in new)
        return [Connection(each.local, each.remote) for each in new]

    def confirm(self, connections: Collection[Connection]) -> None:
        """Lets data into these connections of this worker."""
        for each in tcp_sockets().values():
            if Connection(each.local, each.remote) in connections and not each.listens:
                open_to_data(each)

    async def admit(self, connections: Collection[Connection]) -> None:
        """Lets data into these connections to this worker. UCX accepts them in a thread of its own, without notice.

        Raises: PeerLost when one of them does not arrive.
        """
        loop = asyncio.get_running_loop()
        until, missing, pause = loop.time() + _ARRIVAL_S, set(connections), _LOOK_S
        while missing := missing - self._admitted(missing):
            if loop.time() >= until:
                listed = ", ".join(sorted(each.source for each in missing))
                raise PeerLost(
                    f"No connection from {listed} reached UCX within {_ARRIVAL_S:g} s. Addresses must not be "
                    "translated between workers. Where they are, close the network, and use --guard-transport off."
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_LOOK_S)

    def _admitted(self, connections: Collection[Connection]) -> set[Connection]:
        """Those of these connections that have arrived; data is let in."""
        arrived = {Connection(each.remote, each.local): each for each in tcp_sockets().values() if not each.listens}
        for connection in arrived.keys() & set(connections):
            if connection.target in self._addresses:
                open_to_data(arrived[connection])
        return arrived.keys() & set(connections)

    async def end_strangers(self) -> None:
        """Ends connections that no peer names, until cancelled: they hold descriptors and memory."""
        before = frozenset[int]()
        while True:
            await asyncio.sleep(_NAMED_WITHIN_S)
            # In a thread: the kernel's list may be long.
            before = await asyncio.to_thread(self._end_all_of, before)

    def _end_all_of(self, before: Collection[int]) -> frozenset[int]:
        """Ends the unnamed connections that were there before. Returns the inode numbers of the others."""
        unnamed = {each.inode: each for each in self._unnamed()}
        for inode in unnamed.keys() & before:
            end(unnamed.pop(inode))
        return frozenset(unnamed)

    def strangers(self) -> list[Connection]:
        """Connections to this worker into which no data is let."""
        return [Connection(each.remote, each.local) for each in self._unnamed()]

    def _unnamed(self) -> list[TcpSocket]:
        incoming = (each for each in tcp_sockets().values() if each.local in self._addresses and not each.listens)
        return [each for each in incoming if is_shut(each)]
