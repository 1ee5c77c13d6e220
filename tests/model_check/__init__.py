"""Explicit-state search over the product's own state machines: every interleaving within bounds."""
