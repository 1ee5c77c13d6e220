"""What is written down about requests: decision records, states, metrics."""
