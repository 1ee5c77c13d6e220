"""The only access to Redis."""
