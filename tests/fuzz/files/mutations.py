"""Random damage to a file: to its bytes, and to the values of a JSON document. A seed always gives the same damage."""

from __future__ import annotations

import json
from random import Random

#: Numbers at the borders of what parsers and fixed-width fields hold.
_NUMBERS: tuple[object, ...] = (0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, 1e308, 1e-320)
_TEXTS: tuple[object, ...] = (
    "",
    "\x00",
    "\x1b[2J\nline",
    "\ud800",
    "a" * 5000,
    "..",
    "../../x",
    "(a+)+b",
    "%s",
)
_OTHERS: tuple[object, ...] = (None, True, [], {}, [[]], [None], {"": None}, float("nan"), float("inf"), float("-inf"))
#: Stands for a list that is nested too deep for Python, as JSON.
_NEST, _DEPTH = '"nest me"', 1200


def damaged_json(content: bytes, random: Random) -> bytes:
    """The document with one to three of its values replaced, removed or repeated; sometimes with damaged bytes."""
    document = json.loads(content)
    for _ in range(random.randint(1, 3)):
        document = _damaged_value(document, random)
    text = json.dumps(document).replace(_NEST, "[" * _DEPTH + "0" + "]" * _DEPTH).encode()
    return damaged_bytes(text, random) if random.random() < 0.1 else text


def damaged_bytes(content: bytes, random: Random) -> bytes:
    """The file with one to four bytes or integers overwritten, or a part of it cut out, doubled or moved."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        if not data:
            break
        start = random.randrange(len(data))
        end = min(len(data), start + random.choice((1, 4, 8, 16, 64)))
        match random.randrange(6):
            case 0:
                data[start] = random.randrange(256)
            case 1:
                number = random.choice((0, 1, 2, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data)))
                data[start : start + 8] = number.to_bytes(8, "little")
            case 2:
                del data[start:end]
            case 3:
                data[start:start] = data[start:end]
            case 4:
                del data[start:]
            case _:
                other = random.randrange(len(data))
                data[other : other + end - start] = data[start:end]
    return bytes(data)


def _damaged_value(value: object, random: Random) -> object:
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(list(value))
        if random.random() < 0.15:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: _damaged_value(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        index = random.randrange(len(value))
        if random.random() < 0.2:
            return value[:index] + value[index + 1 :] if random.random() < 0.5 else [*value, value[index]]
        return [*value[:index], _damaged_value(value[index], random), *value[index + 1 :]]
    if random.random() < 0.02:
        return "nest me"
    return random.choice(random.choice((_NUMBERS, _TEXTS, _OTHERS)))
