"""Connections: gRPC, messages over TCP, HTTP, and what bounds them."""
