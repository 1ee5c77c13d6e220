"""The simulated network: connections between processes, with delays, partitions, resets and ends that know of nothing.

What is sent over one connection arrives in order. Different connections overtake each other.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any

from tests.simulation.loop import Process, SimulatedLoop, current_process

#: Time after which the kernel of a live host gives up on a dead one, or on a partition. As `notice_dead_hosts` asks.
DEAD_AFTER_S = 15.0
#: Unread items beyond which a sender is held back.
_WINDOW = 48


class End:
    """One end of a connection. Its owner sends; what arrives goes to its callbacks, in the owner's context."""

    def __init__(self, network: Network, owner: Process, label: str) -> None:
        self._network = network
        self.owner = owner
        self.label = label
        self.peer: End
        self.is_open = True
        self.on_item: Callable[[Any], None] = lambda item: None
        self.on_lost: Callable[[Exception | None], None] = lambda error: None
        #: Called with False when the peer is behind with reading, and with True when it has caught up.
        self.on_window: Callable[[bool], None] = lambda is_open: None
        #: Items on their way to the peer or unread by it, beyond which it is behind.
        self.window = _WINDOW
        self._arrives_at = 0.0
        self._unread: deque[Any] = deque()
        self._is_reading = True
        self._in_flight = 0
        self._is_held_back = False
        #: This end is gone, and its peer was not told: whatever the peer sends is answered with a reset.
        self._is_forgotten = False

    @property
    def in_flight(self) -> int:
        """Items that the peer has not read."""
        return self._in_flight

    def send(self, item: Any) -> None:
        """Sends an item, unless the connection is closed."""
        if not self.is_open or self.owner.is_dead:
            return
        self._in_flight += 1
        if self._in_flight > self.window and not self._is_held_back:
            self._is_held_back = True
            self.on_window(False)
        self._schedule(self.peer._arrive, item)

    def close(self) -> None:
        """Closes after what was sent: the peer then reads the end."""
        if self.is_open and not self.owner.is_dead:
            self.is_open = False
            self._network.forget(self)
            self._schedule(self.peer._lost, None)

    def reset(self) -> None:
        """Closes at once; the peer sees a reset."""
        if self.is_open and not self.owner.is_dead:
            self.is_open = False
            self._network.forget(self)
            self._schedule(self.peer._lost, ConnectionResetError(104, "Connection reset by peer"))

    @property
    def is_reading(self) -> bool:
        """Whether what arrives is handed out."""
        return self._is_reading

    def pause(self) -> None:
        """What arrives waits from now on."""
        self._is_reading = False

    def resume(self) -> None:
        """What has arrived is handed out, and what arrives."""
        if not self._is_reading:
            self._is_reading = True
            self._network.loop.call_soon(self._hand_out, context=self.owner.context)

    # For the network.
    def die(self, with_host: bool) -> None:
        """The owner is dead. Without its host, the kernel closes the connection; what was sent still arrives."""
        if not self.is_open:
            return
        self.is_open = False
        if not with_host:
            self._schedule(self.peer._lost, ConnectionResetError(104, "Connection reset by peer"))
        else:
            self._network.loop.call_later(
                DEAD_AFTER_S,
                self.peer._lost,
                TimeoutError(110, "Connection timed out"),
                context=self.peer.owner.context,
            )

    def drop(self, error: Exception, *, is_noticed: bool) -> None:
        """The connection breaks at this end. The peer notices at once, or only when it sends or after some time."""
        if not self.is_open or not self.peer.is_open:
            return
        peer = self.peer
        self._is_forgotten = True
        self._network.loop.call_soon(self._lost, error, context=self.owner.context)
        if is_noticed:
            self._network.loop.call_soon(peer._lost, error, context=peer.owner.context)
        else:
            self._network.loop.call_later(
                DEAD_AFTER_S, peer._lost, TimeoutError(110, "Connection timed out"), context=peer.owner.context
            )

    def _schedule(self, callback: Callable[[Any], None], argument: Any) -> None:
        network, to = self._network, self.peer.owner
        arrives_at = network.arrival(self.owner, to)
        # In order, also when a later item has a shorter delay.
        self._arrives_at = max(self._arrives_at + 1e-7, arrives_at)
        network.loop.call_at(self._arrives_at, callback, argument, context=to.context)

    def _arrive(self, item: Any) -> None:
        if self._is_forgotten:
            peer = self.peer
            error = ConnectionResetError(104, "Connection reset by peer")
            self._network.loop.call_soon(peer._lost, error, context=peer.owner.context)
        if not self.is_open:
            self._read_by_peer()
            return
        self._unread.append(item)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._unread and self._is_reading and self.is_open:
            item = self._unread.popleft()
            self._read_by_peer()
            self._network.note("read", self.label, item)
            self.on_item(item)

    def _read_by_peer(self) -> None:
        peer = self.peer
        peer._in_flight -= 1
        if peer._is_held_back and peer._in_flight <= peer.window // 2:
            peer._is_held_back = False
            if peer.is_open and not peer.owner.is_dead:
                self._network.loop.call_soon(peer.on_window, True, context=peer.owner.context)

    def _lost(self, error: Exception | None) -> None:
        if not self.is_open:
            return
        if self._unread:  # The reader is behind: it reads first.
            self._network.loop.call_later(0.01, self._lost, error, context=self.owner.context)
            return
        self.is_open = False
        self._network.forget(self)
        self._network.note("lost", self.label, repr(error))
        self.on_lost(error)


class Network:
    """All connections, and who listens where."""

    def __init__(self, loop: SimulatedLoop, chance: Random) -> None:
        self.loop = loop
        self.chance = chance
        self._listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self._ends: dict[str, dict[End, None]] = {}
        #: When messages between two processes get through again, by their names in order.
        self._blocked_until: dict[tuple[str, str], float] = {}
        #: Added to each delay until then.
        self._slow: tuple[float, float] = (0.0, 0.0)
        self._trace = hashlib.blake2b(digest_size=16)
        self.num_messages = 0
        #: Set by `--trace`: gets each line of the trace.
        self.print_line: Callable[[str], None] | None = None

    # Listening and connecting.
    def listen(self, address: str, process: Process, on_open: Callable[[End], None]) -> None:
        """`on_open` gets each new connection, in the context of `process`."""
        self._listeners[address] = process, on_open

    def unlisten(self, address: str, process: Process) -> None:
        """Nothing happens if another process listens there by now."""
        if self._listeners.get(address, (None,))[0] is process:
            del self._listeners[address]

    async def connect(self, address: str, label: str) -> End:
        """An end for the calling process. Raises `ConnectionRefusedError`; waits for as long as a partition lasts."""
        process = current_process()
        assert process is not None, "only simulated processes connect"
        established = self.loop.create_future()
        name = address.partition(":")[0]

        def arrive() -> None:
            process_there, on_open = self._listeners.get(address, (None, None))
            if process_there is None or on_open is None:
                self.loop.call_soon(refuse, context=process.context)
                return
            if process_there.is_dead:
                return  # So is its host: nobody answers.
            own, other = End(self, process, f"{label}>{name}"), End(self, process_there, f"{label}@{name}")
            own.peer, other.peer = other, own
            for end in (own, other):
                self._ends.setdefault(end.owner.name, {})[end] = None
            self.loop.call_soon(on_open, other, context=process_there.context)
            self.loop.call_soon(accept, own, context=process.context)

        def refuse() -> None:
            if not established.done():
                established.set_exception(ConnectionRefusedError(111, "Connection refused"))

        def accept(own: End) -> None:
            if established.done():
                own.reset()
            else:
                established.set_result(own)

        self.loop.call_at(self.arrival(process, name), arrive, context=Context())
        end = await established
        assert isinstance(end, End)
        return end

    def forget(self, end: End) -> None:
        """The end is closed."""
        self._ends.get(end.owner.name, {}).pop(end, None)

    def ends_of(self, name: str) -> list[End]:
        """Open connections of the process of that name."""
        return [end for end in self._ends.get(name, ()) if end.is_open]

    def kill_ends(self, process: Process, with_host: bool) -> None:
        """For `Process.on_death`."""
        for end in list(self._ends.get(process.name, ())):
            if end.owner is process:
                end.die(with_host)
                self.forget(end)
        for address, (owner, _) in list(self._listeners.items()):
            if owner is process and not with_host:
                del self._listeners[address]

    # Delays and faults.
    def arrival(self, sender: Process, receiver: Process | str) -> float:
        """When something sent now arrives."""
        other = receiver if isinstance(receiver, str) else receiver.name
        now, chance = self.loop.time(), self.chance.random()
        delay = 1e-4 + 4e-4 * chance
        if chance > 0.995:
            delay += 0.05 * self.chance.random()
        slow_until, extra = self._slow
        if now < slow_until:
            delay += extra * self.chance.random()
        return max(now, self._blocked_until.get(_pair(sender.name, other), 0.0)) + delay

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a partition is between the two."""
        return self.loop.time() < self._blocked_until.get(_pair(one, other), 0.0)

    def cut(self, one: str, other: str, seconds: float) -> None:
        """A partition. Connections survive a short one: the kernel sends again."""
        self._blocked_until[_pair(one, other)] = self.loop.time() + seconds
        if seconds >= DEAD_AFTER_S:
            self.loop.call_later(DEAD_AFTER_S, self.break_all, one, other, TimeoutError(110, "Connection timed out"))

    def break_all(self, one: str, other: str, error: Exception, *, is_noticed: bool = True) -> None:
        """Every connection between the two breaks, at the first one's end at least."""
        for end in self.ends_of(one):
            if end.peer.owner.name == other:
                end.drop(error, is_noticed=is_noticed)

    def slow_down(self, seconds: float, extra_s: float) -> None:
        """Messages take up to `extra_s` longer, so that connections overtake each other by far."""
        self._slow = self.loop.time() + seconds, extra_s

    # The trace.
    def note(self, kind: str, where: str, what: object = "") -> None:
        """Adds an event to the trace, whose digest says whether two runs were the same."""
        self.num_messages += 1
        line = f"{self.loop.time():.9f} {kind} {where} {what if isinstance(what, bytes | str) else type(what).__name__}"
        self._trace.update(line.encode())
        if self.print_line is not None:
            self.print_line(line)

    @property
    def trace(self) -> str:
        """Digest of everything that was read so far."""
        return self._trace.hexdigest()


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
