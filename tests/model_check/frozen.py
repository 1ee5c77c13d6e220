"""Copies and keys of state machines, whatever their attributes."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from enum import Enum
from typing import Any, TypeVar

M = TypeVar("M")


def cloned(machine: M, *, shared: frozenset[str] = frozenset()) -> M:
    """A copy with its own lists, sets and dictionaries. Attributes in `shared` stay the same objects."""
    twin = copy.copy(machine)
    for name, value in vars(machine).items():
        if name not in shared and isinstance(value, list | set | dict):
            vars(twin)[name] = (
                [list(each) if isinstance(each, list) else each for each in value]
                if isinstance(value, list)
                else copy.copy(value)
            )
    return twin


def key_of(machine: object, *, without: frozenset[str]) -> Hashable:
    """All attributes but those in `without`, as a value that can be hashed."""
    return tuple(_frozen(value) for name, value in vars(machine).items() if name not in without)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((_frozen(name), _frozen(each)) for name, each in value.items())
    if isinstance(value, BaseException):
        return type(value).__name__
    if isinstance(value, Enum):
        return value.value
    hash(value)
    key: Hashable = value
    return key
