"""/v1/files: what batches read, and what they have written."""
