"""The OpenAI-compatible HTTP API: what may be asked, how it is answered."""
