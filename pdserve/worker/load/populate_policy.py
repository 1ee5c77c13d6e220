"""When the next piece of a KV cache is populated: when all workers of the machine rest. Pure.

Idle priority does not help. It holds only within a scheduling group, and every container and every session is a group
of its own. Between groups, a thread of idle priority takes as much of a core as the thread that computes there.
"""

from __future__ import annotations

#: Bytes of one call: a huge page. It cannot be interrupted, and in a fresh virtual machine it takes some milliseconds.
PIECE_BYTES = 2 * 1024**2
#: Bytes populated before a worker is ready.
HEAD_BYTES = 16 * 1024**2
#: A machine rests when no worker has had work for this long.
QUIET_S = 0.25
#: Interval of looking whether a worker has work.
INTERVAL_S = 0.02


class PopulatePolicy:
    """Follows the activity of a machine's workers. `now` is a monotonic clock's."""

    def __init__(self, now: float) -> None:
        self._busy_at = now

    def may_populate(self, now: float, *, is_busy: bool) -> bool:
        """Whether to populate a piece now."""
        if is_busy:
            self._busy_at = now
        return now - self._busy_at >= QUIET_S
