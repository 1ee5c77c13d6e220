"""Compares pdserve with its peers in one run: sets them up, measures, and writes the table of required ratios."""
