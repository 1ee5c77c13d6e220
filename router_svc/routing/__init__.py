"""The choice of workers for requests: the cluster, placement, local prefill, work in flight."""
