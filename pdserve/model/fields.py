"""Typed reads of a JSON object of a model; a wrong value raises a `SetupError` that names the field."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pdserve.base.errors import SetupError

#: Far above any dimension of a real model, and small enough that a product of two is exact.
_MAX_INTEGER = 2**31 - 1
#: Far above the size of a real config. Parsed JSON takes up to some twenty times as much memory.
_MAX_JSON_BYTES = 16 << 20
#: Far above the number of tokens that end a text.
_MAX_TOKEN_IDS = 1024


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. Raises `SetupError` when it cannot be read, or is larger than the limit."""
    try:
        if not path.is_file() and path.exists():
            raise SetupError(f"Cannot read {path}: it is not a regular file. Replace it with one.")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise SetupError(f"Cannot read {path}: {error.strerror}.") from error
    if len(content) > max_bytes:
        raise SetupError(f"{path} is larger than {max_bytes} bytes, the limit of its kind. Use a smaller file.")
    return content


def read_text(path: Path, max_bytes: int) -> str:
    """As `read_bytes`, for a text in UTF-8, with newlines as they are."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not valid UTF-8: {error}.") from error


class Fields:
    """One JSON object, with its name for errors. A null field counts as absent."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self.where = where

    @classmethod
    def read(cls, path: Path, max_bytes: int = _MAX_JSON_BYTES) -> Fields:
        """Read a file. Raises `SetupError` when that fails or it is not a JSON object."""
        content = read_bytes(path, max_bytes)
        try:
            values = json.loads(content.decode())
        except (ValueError, RecursionError, MemoryError) as error:
            raise SetupError(f"{path} is not valid JSON: {error}.") from error
        if not isinstance(values, dict):
            raise SetupError(f"{path} holds a JSON {type(values).__name__}, but must hold an object.")
        return cls(values, str(path))

    @classmethod
    def read_optional(cls, path: Path) -> Fields:
        """Like `read`, but a file that does not exist is an empty object."""
        return cls.read(path) if os.path.lexists(path) else cls({}, str(path))

    def has(self, name: str) -> bool:
        """Whether the field exists and is not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value unchecked; None when absent."""
        return self._values.get(name)

    def wrong(self, name: str, expected: str) -> SetupError:
        """The error for a field that is missing or has a wrong value."""
        if not self.has(name):
            return SetupError(f"{self.where}: {name} is missing, but must be {expected}.")
        return SetupError(f"{self.where}: {name} is {_shortened(self._values[name])}, but must be {expected}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_INTEGER:
            raise self.wrong(name, "a positive integer below 2**31")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of exactly `length` finite numbers above zero."""
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(name, f"a list of {length} numbers")
        return tuple(Fields({name: item}, self.where).number(name) for item in value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if len(items) > _MAX_TOKEN_IDS or not all(map(_is_token_id, items)):
            raise self.wrong(name, f"a token id below 2**31, or a list of at most {_MAX_TOKEN_IDS} of them")
        return tuple(items)

    def object(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return Fields({}, f"{self.where}: {name}")
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def names(self) -> tuple[str, ...]:
        """The names of all fields, null or not."""
        return tuple(self._values)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INTEGER


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
