"""Differences between two states of the console, as JSON merge patches (RFC 7386). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from router_svc.records.record_json import Json


def merge_patch(old: Mapping[str, Json], new: Mapping[str, Json]) -> dict[str, Json]:
    """The patch that makes `new` of `old`. Objects are compared by member, anything else as a whole.

    A null in a patch removes the member, so a member that is null and one that is absent are the same to a reader.
    """
    patch: dict[str, Json] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if value == before:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            patch[key] = merge_patch(before, value)
        else:
            patch[key] = value
    return patch
