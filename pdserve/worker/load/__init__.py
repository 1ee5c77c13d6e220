"""Loading one rank's shard of a model and sizing its KV cache: device, memory and cores."""
