"""The secrets of a cluster: what they are, and where they are written."""
