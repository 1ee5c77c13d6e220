"""Fixtures of the router's unit tests."""

from __future__ import annotations

from tests.support.tiny_model import model_dir

__all__ = ["model_dir"]
