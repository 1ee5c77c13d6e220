"""pdserve beside its peers, in one run: sets them up, measures, writes the table of floors and what was reached."""
