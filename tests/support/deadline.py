"""The bound of every wait for an event: one that a test reaches has hung."""

from __future__ import annotations

#: Longer than a shared machine can stall. A wait ends with its event, so a long bound costs nothing.
DEADLINE_S = 60.0
