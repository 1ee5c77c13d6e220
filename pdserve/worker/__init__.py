"""Code that prefill and decode workers share, above the engine and KV transfer: loading, KV bytes, ranks, serving."""
