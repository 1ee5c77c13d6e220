"""Fixtures of tests with real workers in this process."""

from __future__ import annotations

from tests.support.redis import redis_server

__all__ = ["redis_server"]
