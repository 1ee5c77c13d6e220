"""Keeps a set of processes running on one machine: starts, watches, restarts and stops them.

Knows nothing of pdserve's tiers. `spec` says what to run, `backoff` when to restart, `launch` ties a child's life to
ours, `notify_socket` hears that it is ready, `child` is one incarnation, `supervisor` runs them all.
"""
