"""One client request's way through the cluster: admission, recovery, output."""
