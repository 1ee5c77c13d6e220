"""The prompts of one request in waves: the queue has no space for thousands at once, whatever the cluster can do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pdserve.base.errors import Overloaded
from pdserve.base.tasks import ServiceGroup, in_turns
from router_svc.request.admission import Entrant
from router_svc.request.client import Client
from router_svc.request.fair_order import QueueSlot
from router_svc.request.gate import Gate
from router_svc.request.stream import DeltaStream

#: Prompts of one request that wait or run at a time. Their slots are taken at once.
MAX_AT_ONCE = 512

#: Starts the prompt with this index, in this slot.
Start = Callable[[int, QueueSlot], asyncio.Task[None]]


class Waves:
    """Enters the queue with some prompts at a time, and with the next ones when all of these have ended."""

    def __init__(self, gate: Gate, entrants: Sequence[Entrant], client: Client, on_refused: Callable[[], None]) -> None:
        """`on_refused` is called when the queue takes no more."""
        self._gate = gate
        self._entrants = entrants
        self._client = client
        self._on_refused = on_refused

    @contextmanager
    def first(self) -> Iterator[list[QueueSlot]]:
        """The slots of the first wave. Raises `Overloaded`."""
        with self._slots(0) as slots:
            yield slots

    def run(self, slots: Sequence[QueueSlot], start: Start, group: ServiceGroup, stream: DeltaStream) -> None:
        """Starts the first wave, and the others as they come. If the queue has no space for one, the request fails."""
        running = [start(index, slot) for index, slot in enumerate(slots)]
        if len(running) < len(self._entrants):
            group.start(self._run_others(running, start, stream), name="waves")

    async def _run_others(self, running: Sequence[asyncio.Task[None]], start: Start, stream: DeltaStream) -> None:
        await asyncio.wait(running)
        try:
            for first in range(len(running), len(self._entrants), MAX_AT_ONCE):
                with self._slots(first) as slots:
                    await asyncio.wait([start(first + index, slot) async for index, slot in in_turns(enumerate(slots))])
                await asyncio.sleep(0)  # The next wave enters the queue in another callback.
        except Overloaded as error:
            stream.end(error)

    @contextmanager
    def _slots(self, first: int) -> Iterator[list[QueueSlot]]:
        try:
            slots = self._gate.enter(self._entrants[first : first + MAX_AT_ONCE], self._client)
        except Overloaded:
            self._on_refused()
            raise
        try:
            yield slots
        finally:
            for slot in slots:
                self._gate.leave(slot)
