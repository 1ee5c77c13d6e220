"""Anything in Redis: what other processes keep there is read as if strangers had written it."""
