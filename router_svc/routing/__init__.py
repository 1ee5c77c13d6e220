"""Which worker gets a request, and how it is reached."""
