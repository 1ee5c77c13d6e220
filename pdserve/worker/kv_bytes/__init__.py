"""KV blocks as bytes that transports send and receive: in place, or through a stage in host or GPU memory."""
