"""The default model, resolved as by `pdserve up`: the first run on a machine downloads and converts it."""

from __future__ import annotations

import pytest

from pdserve.model.resolve import ResolvedModel, resolve_model


@pytest.fixture(scope="session")
def default_model() -> ResolvedModel:
    """The default model in the cache that `pdserve up` uses, too."""
    return resolve_model()
