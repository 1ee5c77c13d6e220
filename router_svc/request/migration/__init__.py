"""A request on decode workers, and its moves from one to another while it runs."""
