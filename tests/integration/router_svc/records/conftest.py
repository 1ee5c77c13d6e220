"""Fixtures of the request store's integration tests."""

from __future__ import annotations

from tests.support.stores import nothing_left_behind, router_store

__all__ = ["nothing_left_behind", "router_store"]
