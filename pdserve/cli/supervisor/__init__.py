"""Keeps a set of processes running on one machine: starts, watches, restarts and stops them.

Independent of pdserve's tiers. `spec` describes processes and events, `backoff` decides when to restart, `launch` ties
a child's life to ours, `notify_socket` receives its status, `child` is one incarnation, `supervisor` runs them all.
"""
