"""The HTTP and gRPC APIs: from bytes to generations, and from deltas to responses."""
