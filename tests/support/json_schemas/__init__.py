"""JSON schemas of our own making, texts that match them or do not, and the `jsonschema` library as the judge."""
