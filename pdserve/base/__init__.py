"""What every process shares: errors, ids, config, tasks, logs, metrics, rpc helpers. No torch."""
