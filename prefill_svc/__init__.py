"""The prefill tier: computes prompts in chunks and streams their KV blocks to decode workers."""
