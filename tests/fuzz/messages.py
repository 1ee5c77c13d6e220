"""Random damage to a protobuf message: to the values of its fields, and to its bytes. A seed always gives the same."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.files.mutations import damaged_bytes

_F = FieldDescriptor
_RANGES = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), (-(2**31), 2**31 - 1)),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), (-(2**63), 2**63 - 1)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), (0, 2**32 - 1)),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), (0, 2**64 - 1)),
    _F.TYPE_ENUM: (-1, 2**31 - 1),
}
_FLOATS = (0.0, -0.0, -1.0, 0.5, 2.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "\x00", "\x1b[2J\nline", "a" * 300, "a" * 5000, "../../x", "%s", "\u202e\u0000", "0", "-1", "x y", "é")
#: Copies of an item in a list that becomes long.
_LONG = 3000
#: Bytes or characters of an item that is not repeated so often.
_LARGE = 40
_MAX_CHANGES = 4


def damaged_message(message: Message, random: Random) -> bytes:
    """The message with some of its fields changed, encoded; sometimes with damaged bytes, or twice."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(random.randint(1, _MAX_CHANGES)):
        _change(changed, random)
    data = changed.SerializeToString()
    chance = random.random()
    if chance < 0.15:
        return damaged_bytes(data, random)
    if chance < 0.2:  # Fields of the second one add to, or replace, those of the first.
        return data + message.SerializeToString()
    return data


def _change(message: Message, random: Random) -> None:
    """Changes one field, of this message or of one within it."""
    field = random.choice(message.DESCRIPTOR.fields)
    if _is_map(field):
        _change_map(message, field, random)
    elif field.is_repeated:
        _change_list(message, field, random)
    elif field.type == _F.TYPE_MESSAGE:
        if random.random() < 0.15:
            message.ClearField(field.name)
        else:
            child = getattr(message, field.name)
            child.SetInParent()
            if child.DESCRIPTOR.fields:
                _change(child, random)
    elif random.random() < 0.15:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), random))


def _change_list(message: Message, field: FieldDescriptor, random: Random) -> None:
    items = getattr(message, field.name)
    kind = random.randrange(5)
    if field.type == _F.TYPE_MESSAGE:
        if kind == 0 and items:
            del items[random.randrange(len(items))]
        elif kind == 1:
            items.add()
        elif kind == 2 and items:
            items.add().CopyFrom(items[0])
        elif items and items[0].DESCRIPTOR.fields:
            _change(random.choice(list(items)), random)
        return
    if kind == 0 and items:
        del items[random.randrange(len(items)) :]
    elif kind == 1:
        value = _value(field, items[0] if items else None, random)
        # Many or large ones: a message of megabytes would only show how long it takes to make.
        is_large = isinstance(value, bytes | str) and len(value) > _LARGE
        items.extend([value] * (2 if is_large else random.choice((1, 2, 130, _LONG))))
    elif items:
        items[random.randrange(len(items))] = _value(field, items[0], random)
    else:
        items.append(_value(field, None, random))


def _change_map(message: Message, field: FieldDescriptor, random: Random) -> None:
    entries = getattr(message, field.name)
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(random.choice((1, 1, 1, 400))):
        entries[_value(key, None, random)] = _value(value, None, random)


def _value(field: FieldDescriptor, present: Any, random: Random) -> Any:
    match field.type:
        case _F.TYPE_BOOL:
            return not present
        case _F.TYPE_DOUBLE | _F.TYPE_FLOAT:
            return random.choice(_FLOATS)
        case _F.TYPE_STRING:
            return random.choice((*_TEXTS, f"{present}x", str(present)[:-1]))
        case _F.TYPE_BYTES:
            size = random.choice((0, 1, 15, 16, 17, 31, 32, 33, 64, 70_000))
            return damaged_bytes(present, random) if present and random.random() < 0.5 else random.randbytes(size)
    low, high = _RANGES[field.type]
    near = [] if present is None else [present - 1, present + 1]
    numbers = (0, 1, 2, 17, 100, 128, 129, 1000, 2**20, 2**31 - 1, low, high, random.randint(low, high), *near)
    return random.choice([number for number in numbers if low <= number <= high])


def _is_map(field: FieldDescriptor) -> bool:
    return field.type == _F.TYPE_MESSAGE and field.message_type.GetOptions().map_entry
