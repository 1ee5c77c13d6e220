"""Sizes of messages to a worker: what its model and its blocks can need, so that a stranger's 64 MiB are not parsed."""

from __future__ import annotations

from pdserve.base.sampling import MAX_CONTINUED_TOKENS, MAX_N
from pdserve.worker.serve.loaded_model import LoadedModel

#: Bytes of an encoded token id, at most.
_BYTES_PER_ID = 5
#: Digest of a message of a transfer, with its tag and length.
_BYTES_PER_DIGEST = 18
#: All other fields: sampling parameters, ids, a ticket with the address for blocks.
_OTHER_BYTES = 256 * 1024


def max_start_bytes(model: LoadedModel) -> int:
    """Bytes of a request with the longest prompt, and the output with which it may come from another worker."""
    output = min(MAX_N * model.limits.max_model_len, MAX_CONTINUED_TOKENS)
    return _BYTES_PER_ID * (model.limits.max_model_len + output) + _OTHER_BYTES


def max_call_bytes(model: LoadedModel) -> int:
    """Bytes of a gRPC message: the longest request, or a commit with a digest for each layer of each block."""
    num_blocks = -(-model.limits.max_model_len // model.layout.block_size)
    return max_start_bytes(model) + _BYTES_PER_DIGEST * num_blocks * model.layout.num_layers
