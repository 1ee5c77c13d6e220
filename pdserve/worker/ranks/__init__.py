"""One worker, several ranks: the first serves, the others are its child processes and compute what it computes."""
