"""Fixtures for tests of `pdserve.worker` with a real Redis."""

from __future__ import annotations

from tests.support.redis import redis_server
from tests.support.stores import nothing_left_behind, worker_store

__all__ = ["nothing_left_behind", "redis_server", "worker_store"]
