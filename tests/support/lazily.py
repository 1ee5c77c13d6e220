"""Packages that take seconds to import, imported with their first use: each pytest process collects all tests."""

from __future__ import annotations

import importlib
from types import ModuleType


class _Lazily(ModuleType):
    """A module that is imported when an attribute of it is read."""

    def __getattr__(self, name: str) -> object:
        # pytest and Hypothesis look for such names in all that a test module has.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


anthropic = _Lazily("anthropic")
langchain_openai = _Lazily("langchain_openai")
langchain_tools = _Lazily("langchain_core.tools")
ollama = _Lazily("ollama")
openai = _Lazily("openai")
openapi_spec_validator = _Lazily("openapi_spec_validator")
transformers = _Lazily("transformers")
