"""The names by which clients of Ollama's API call the served models."""

from __future__ import annotations

from router_svc.api.models import ModelBackend, Models
from router_svc.request.client import Client

_TAG = ":latest"


def chosen_by_name(given: str, models: Models, client: Client) -> ModelBackend:
    """The model of a name that may have the tag that Ollama's clients add. Raises `NotFound` and `Forbidden`."""
    return models.chosen(given if models.has_name(given) else given.removesuffix(_TAG), client)
