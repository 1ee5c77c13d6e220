"""Calls of strangers to the gRPC API of the router, and bytes to its port."""
