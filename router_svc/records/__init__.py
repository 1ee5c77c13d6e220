"""Reports about requests: journals, decision records, states in Redis, metrics."""
