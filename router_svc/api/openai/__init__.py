"""The OpenAI-compatible HTTP API: endpoints, bodies and response formats."""
