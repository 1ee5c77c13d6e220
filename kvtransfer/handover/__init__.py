"""The handover: two protocol machines and their I/O layers, which move a prompt's KV from prefill to decode."""
