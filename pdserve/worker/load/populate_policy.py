"""When the next piece of a KV cache is populated: when all workers rest, or when little is left ahead of use. Pure.

Idle priority does not help. It holds only within a scheduling group, and every container and every session is a group
of its own. Between groups, a thread of idle priority takes as much of a core as the thread that computes there.
"""

from __future__ import annotations

#: Bytes of one call: a huge page. It cannot be interrupted, and in a fresh virtual machine it takes some milliseconds.
PIECE_BYTES = 2 * 1024**2
#: Bytes populated before a worker is ready, and kept populated ahead of the blocks in use.
AHEAD_BYTES = 16 * 1024**2
#: A machine rests when no worker has had work for this long.
QUIET_S = 0.25
#: Interval of pieces while a worker has work, and of looking whether one has.
INTERVAL_S = 0.02


class PopulatePolicy:
    """Follows the activity of a machine's workers. `now` is a monotonic clock's."""

    def __init__(self, now: float) -> None:
        self._busy_at = now
        self._populated_at = now

    def may_populate(self, now: float, *, is_busy: bool, bytes_ahead: int) -> bool:
        """Whether to populate a piece now.

        `bytes_ahead`: populated bytes behind the last block that was ever in use; negative if use was faster.
        """
        if is_busy:
            self._busy_at = now
        rests = now - self._busy_at >= QUIET_S
        if rests or (bytes_ahead < AHEAD_BYTES and now - self._populated_at >= INTERVAL_S):
            self._populated_at = now
            return True
        return False
