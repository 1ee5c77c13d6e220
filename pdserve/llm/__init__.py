"""The Python API: `LLM` and `AsyncLLM`, with vLLM's names, over a cluster that runs or one of their own."""
