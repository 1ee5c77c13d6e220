"""Code that every process shares: errors, ids, config, tasks, logs, metrics, RPC and Redis. No torch."""
