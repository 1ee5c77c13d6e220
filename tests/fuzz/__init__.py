"""Fuzzing with seeds: a short run in `make test`, as long as one likes with `make fuzz`."""
