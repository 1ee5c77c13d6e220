"""A base of 1 for the rotary embedding is refused where it means nothing."""

from __future__ import annotations

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from tests.unit.model.tiny import LLAMA


def test_yarn_with_a_theta_of_1_is_a_setup_error() -> None:
    """Its logarithm divides."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    with pytest.raises(SetupError, match="rope_theta"):
        ModelConfig.from_hf({**LLAMA, "rope_theta": 1.0, "rope_scaling": scaling})
