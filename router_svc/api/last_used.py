"""What was made for the last requests: agents send the same tools and templates again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LastUsed(Generic[Value]):
    """Values by digests of what they were made of, those used last. For several threads."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[bytes, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes, make: Callable[[], Value]) -> Value:
        """The value of this key. Raises what `make` raises, and keeps nothing then."""
        with self._lock:
            value = self._kept.get(key)
        if value is None:
            value = make()
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        return value
