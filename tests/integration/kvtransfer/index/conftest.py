"""Fixtures of the prefix index's integration tests."""

from tests.support.stores import nothing_left_behind, router_store, worker_store

__all__ = ["nothing_left_behind", "router_store", "worker_store"]
