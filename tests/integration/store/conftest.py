"""Fixtures of the store's integration tests."""

from __future__ import annotations

from tests.support.redis import redis_server

__all__ = ["redis_server"]
