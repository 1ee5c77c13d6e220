"""/v1/batches: many requests from a file, which run with the lowest priority."""
