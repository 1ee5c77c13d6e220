"""Requests that move from one decode worker to another while they run."""
