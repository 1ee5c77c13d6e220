"""A worker with several ranks: rank 0 serves, and its child processes compute what it computes."""
