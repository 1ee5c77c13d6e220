"""How much a chat template has to handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Template work for a message without content, as a number of characters.
MESSAGE_COST = 64


def chat_size(messages: Sequence[Mapping[str, object]], template_kwargs: Mapping[str, object]) -> int:
    """Characters that a template has to handle. It may print each of its variables with every message."""
    variables = sum(len(name) + characters_of(value) for name, value in template_kwargs.items())
    return characters_of(messages) + len(messages) * (MESSAGE_COST + variables) + variables


def characters_of(value: object) -> int:
    """Characters of texts and keys, and one for each other value."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(len(str(name)) + characters_of(each) for name, each in value.items())
        case list() | tuple():
            return 1 + sum(map(characters_of, value))
        case _:
            return 1
