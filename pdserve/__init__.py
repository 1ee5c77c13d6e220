"""pdserve: a disaggregated prefill/decode cluster for large language models.

The names of the Python API are imported when they are used first: services import this package, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.llm.async_llm import AsyncLLM
    from pdserve.llm.errors import PromptFailed, PromptRefused, ShutDown
    from pdserve.llm.llm import LLM
    from pdserve.llm.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pdserve.llm.pooling_params import PoolingParams
    from pdserve.llm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.2.0.dev0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingParams",
    "PromptFailed",
    "PromptRefused",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ShutDown",
    "StructuredOutputsParams",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "Logprob": "outputs",
    "PoolingParams": "pooling_params",
    "PromptFailed": "errors",
    "PromptRefused": "errors",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "ShutDown": "errors",
    "StructuredOutputsParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pdserve.llm.{_MODULES[name]}"), name)
