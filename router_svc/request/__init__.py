"""The way of a client request through the cluster: admission, saga, recovery, output."""
