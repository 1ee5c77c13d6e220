"""pdserve: a disaggregated prefill/decode cluster for large language models."""

__version__ = "0.2.0.dev0"
