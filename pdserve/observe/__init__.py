"""What an operator sees of a process: metrics, traces, the audit log, facts for `pdserve doctor`."""
