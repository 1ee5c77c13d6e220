"""Values of settings that are written in a form of their own: sizes, lists of numbers, lines."""

from __future__ import annotations

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `2GiB`, `512Mi`, `80GB`, `1.5G` or `1000000`. Raises ValueError."""
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip().removesuffix("b")
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{text!r} is not a size; write, for example, 2GiB or 512MiB") from error


def parse_ints(text: str) -> tuple[int, ...]:
    """Comma-separated numbers and ranges: `0,2-3` is (0, 2, 3). Raises ValueError."""
    values: list[int] = []
    try:
        for item in filter(None, text.split(",")):
            first, dash, last = item.partition("-")
            values.extend(range(int(first), int(last) + 1) if dash else [int(first)])
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers and ranges; write, for example, 0,2-3") from None
    return tuple(values)


def parse_lines(text: str) -> tuple[str, ...]:
    """The lines that are not empty."""
    return tuple(line for each in text.splitlines() if (line := each.strip()))
