"""The decode tier: receives KV blocks and generates tokens with continuous batching."""
