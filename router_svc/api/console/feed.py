"""The stream of states that feeds the console: one state per interval, shared by all readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from pdserve.base.changes import Changes
from pdserve.base.errors import Overloaded
from router_svc.api.console.merge_patch import merge_patch
from router_svc.api.console.state import ClusterState
from router_svc.records.record_json import Json

#: Seconds after which a refused reader may try again.
_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Update:
    """One state: as a whole, and as the difference to the previous one. Both are encoded once, when first needed."""

    version: int
    at: float
    interval_s: float
    state: dict[str, Json]
    patch: dict[str, Json]
    history: dict[str, Json]
    #: The latest row of the history if it is new, else None.
    sample: list[Json] | None

    @cached_property
    def whole(self) -> bytes:
        """The event for a reader that has nothing, or missed something."""
        return self._event("state", {"interval_s": self.interval_s, "state": self.state, "history": self.history})

    @cached_property
    def difference(self) -> bytes:
        """The event for a reader that has the previous state."""
        return self._event("patch", {"patch": self.patch, "sample": self.sample})

    def _event(self, name: str, fields: dict[str, Json]) -> bytes:
        data = json.dumps({"version": self.version, "now": self.at, **fields}, separators=(",", ":"))
        return f"event: {name}\ndata: {data}\n\n".encode()


class Feed:
    """Reads the state at each interval while there are readers, and the load always, so that its course is known."""

    def __init__(
        self, source: ClusterState, *, max_readers: int, interval_s: float = 1.0, intervals_per_sample: int = 5
    ) -> None:
        self._source = source
        self._max_readers = max_readers
        self._interval_s = interval_s
        self._intervals_per_sample = intervals_per_sample
        self._changes = Changes()
        self._update: Update | None = None
        self._is_closed = False
        #: Open readers.
        self.num_readers = 0
        #: Samples of the load taken so far.
        self.num_samples = 0

    @property
    def version(self) -> int:
        """The version of the latest update; 0 before the first one."""
        return 0 if self._update is None else self._update.version

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Counts a reader. Raises `Overloaded` beyond the limit."""
        if self.num_readers >= self._max_readers:
            raise Overloaded(
                f"This router has {self.num_readers} open consoles, limit {self._max_readers} (--console-clients). "
                "Close one, or raise the limit.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_readers += 1
        if self.num_readers == 1:
            # Without readers there were no updates: the last one may be old.
            self._advance(None)
        try:
            yield
        finally:
            self.num_readers -= 1

    async def next(self, after: int | None) -> Update | None:
        """The latest update, once it is not the version `after`. None when the feed is closed."""
        while not self._is_closed:
            if self._update is not None and self._update.version != after:
                return self._update
            await self._changes.wait(self._changes.version)
        return None

    def close(self) -> None:
        """Ends all readers, because the router stops."""
        self._is_closed = True
        self._changes.bump()

    async def run(self) -> None:
        """Advances until cancelled."""
        interval = 0
        while True:
            row = None
            if interval % self._intervals_per_sample == 0:
                row = self._source.sample().as_row()
                self.num_samples += 1
            if self.num_readers:
                self._advance(row)
            interval += 1
            await asyncio.sleep(self._interval_s)

    def _advance(self, sample: list[Json] | None) -> None:
        before, state = self._update, self._source.read()
        self._update = Update(
            version=self.version + 1,
            at=round(self._source.now(), 3),
            interval_s=self._interval_s,
            state=state,
            patch=merge_patch(before.state if before else {}, state),
            history=self._source.history.as_json(),
            sample=sample,
        )
        self._changes.bump()
