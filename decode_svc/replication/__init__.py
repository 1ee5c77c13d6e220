"""Copies of running requests' blocks at other decode workers, for when this one is lost."""
