"""The names by which clients of Ollama's API call the served models."""

from __future__ import annotations

from router_svc.api.models import ModelBackend, Models
from router_svc.request.client import Client

_TAG = ":latest"


def chosen_by_name(given: str | None, models: Models, client: Client) -> ModelBackend:
    """The model of a name that may have the tag that Ollama's clients add. Raises `NotFound` and `Forbidden`."""
    if given is not None and not models.has_name(given):
        given = given.removesuffix(_TAG)
    return models.chosen(given, client)
