"""Fixtures for tests of `pdserve.peers` with a real Redis."""

from __future__ import annotations

from tests.support.stores import nothing_left_behind, router_store, worker_store

__all__ = ["nothing_left_behind", "router_store", "worker_store"]
