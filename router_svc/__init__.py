"""The front door: OpenAI HTTP and gRPC in, workers chosen, each request taken through the cluster."""
