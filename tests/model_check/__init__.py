"""Explicit-state search over the product's own machines, scheduler and saga: every interleaving within bounds."""
