"""Explicit-state search over the product's own state machines and scheduler: every interleaving within bounds."""
