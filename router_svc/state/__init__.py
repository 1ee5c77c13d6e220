"""What routers store for longer than a request: responses, and the events of those that run in the background."""
