"""Serving: a worker process from start to drain, its step loop, inboxes and metrics, and its record in the registry."""
