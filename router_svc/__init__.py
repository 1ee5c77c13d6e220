"""The router: serves the OpenAI HTTP and gRPC APIs, chooses workers, and runs each request through the cluster."""
