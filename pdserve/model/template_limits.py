"""Limits of one rendering of a chat template: a deadline, and how many characters its operations may make. No torch.

The size of a result is computed before the result is. So no operation of a hostile template takes memory or time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

import jinja2
from jinja2.runtime import Macro
from jinja2.utils import Namespace

#: Longest text, and largest list, of a rendering.
MAX_RENDERED_CHARS = 16_000_000
#: Characters that all operations of a rendering may make together.
_MAX_TOTAL_CHARS = 128_000_000
#: Largest width, indent or number of parts.
_MAX_WIDTH = 10_000
_MAX_BITS = 20_000
#: Weight of an item of a list in characters.
_ITEM = 8
_OTHER = 64
#: Steps between two looks at the clock.
_STEPS = 4096
_UNUSUAL_FORMAT = re.compile(r"\d{5}|\*")
_UNUSUAL_FIELD = re.compile(r"\d{5}|:[^{}]*\{")


class LimitReached(jinja2.TemplateError):
    """Rendering takes too long, or makes too much."""


@dataclass(slots=True)
class Meter:
    """What one rendering has used."""

    deadline: float
    num_chars: int = 0

    @classmethod
    def start(cls, timeout_s: float) -> Meter:
        """A meter whose deadline is `timeout_s` from now."""
        return cls(monotonic() + timeout_s)

    def tick(self) -> None:
        """Raises `LimitReached` when the deadline has passed."""
        if monotonic() > self.deadline:
            raise LimitReached("rendering takes too long")

    def reserve(self, num_chars: int) -> None:
        """Counts a result before it is made. Raises `LimitReached` when it is too large, or all are together."""
        self.num_chars += num_chars
        if num_chars > MAX_RENDERED_CHARS:
            raise LimitReached(f"a text is longer than {MAX_RENDERED_CHARS} characters")
        if self.num_chars > _MAX_TOTAL_CHARS:
            raise LimitReached(f"all texts together are longer than {_MAX_TOTAL_CHARS} characters")


#: Meter of the rendering in this context.
METER: ContextVar[Meter] = ContextVar("chat_template_meter")


def size_of(value: object) -> int:
    """Upper bound of the characters of `str(value)`, in which shared parts count each time.

    Raises `LimitReached` once it is beyond the limit.
    """
    if isinstance(value, str | bytes):
        return len(value)
    size, steps, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        items = _items(item)
        size += len(item) + _ITEM if isinstance(item, str | bytes) else _OTHER if items is None else _ITEM
        waiting.extend(items or ())
        steps += 1
        if size + _ITEM * len(waiting) > MAX_RENDERED_CHARS:
            raise LimitReached(f"a value has more than {MAX_RENDERED_CHARS} characters")
        if not steps % _STEPS:
            METER.get().tick()
    return size


def _items(value: object) -> Sequence[object] | None:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | ItemsView | KeysView | ValuesView):
        return list(value)
    if isinstance(value, Namespace):
        return list(object.__getattribute__(value, "_Namespace__attrs").items())
    return None


def checked(value: object) -> object:
    """The value, of which the size is counted if it is a container."""
    if isinstance(value, str) or _items(value) is None:
        return value
    METER.get().reserve(size_of(value))
    return value


def counted(value: object) -> object:
    """The value, of which the size is counted: a part of the output, or a slice."""
    METER.get().reserve(len(value) if isinstance(value, str) else size_of(value))
    return value


def reserve_operator(operator: str, left: object, right: object) -> None:
    """Counts the result of `left operator right`."""
    meter = METER.get()
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        meter.reserve(len(left) + len(right))
    elif operator == "**":
        if not (_is_small(left) and _is_small(right)):
            raise LimitReached("a power is too large")
    elif operator == "%" and isinstance(left, str | bytes):
        meter.reserve(_formatted(left.decode("latin-1") if isinstance(left, bytes) else left, "%", [right]))
    elif isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise LimitReached("a number is too large")
    elif operator == "*":
        meter.reserve(_repeated(left, right) + _repeated(right, left))
    elif operator == "+" and not (isinstance(left, int | float) and isinstance(right, int | float)):
        meter.reserve(size_of(left) + size_of(right))


def _repeated(value: object, times: object) -> int:
    if isinstance(value, str | bytes | list | tuple) and isinstance(times, int) and times > 0:
        return (size_of(value) + _ITEM) * times
    return 0


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1000


def reserve_method(method: object, arguments: list[object]) -> None:
    """Counts the result of a method of a text or number; other callables are counted by what they make."""
    owner = getattr(method, "__self__", None)
    if isinstance(method, Macro) or not isinstance(owner, str | bytes | int | float):
        return
    text = owner if isinstance(owner, str) else str(owner)
    METER.get().reserve(result_size(getattr(method, "__name__", ""), text, arguments))


def result_size(name: str, value: object, arguments: list[object]) -> int:
    """Upper bound of the result of the method or filter `name` on a value, in characters.

    Raises `LimitReached` for a width that no template needs.
    """
    if any(isinstance(each, int) and abs(each) > _MAX_WIDTH for each in arguments):
        raise LimitReached(f"a width or number is above {_MAX_WIDTH}")
    size = size_of(value)
    grow = _SIZES.get(name)
    return grow(value, size, arguments) if grow else size


def _formatted(text: str, sign: str, arguments: list[object]) -> int:
    if (_UNUSUAL_FORMAT if sign == "%" else _UNUSUAL_FIELD).search(text):
        raise LimitReached("a format has a width that is too large, or computed")
    # With at most four digits, a width is below this.
    return len(text) + text.count(sign) * (sum(map(size_of, arguments)) + (_MAX_WIDTH if re.search(r"\d", text) else 0))


def _argument(arguments: list[object], index: int) -> object:
    return arguments[index] if index < len(arguments) else None


def _width(value: object, size: int, arguments: list[object]) -> int:
    return size + _MAX_WIDTH if arguments else size + 80


def _tabs(value: object, size: int, arguments: list[object]) -> int:
    width = _argument(arguments, 0)
    return size + str(value).count("\t") * (width if isinstance(width, int) else 8)


def _replaced(value: object, size: int, arguments: list[object]) -> int:
    text, old, new = str(value), str(_argument(arguments, 0)), str(_argument(arguments, 1))
    return size + (text.count(old) if old else len(text) + 1) * len(new)


def _method_join(value: object, size: int, arguments: list[object]) -> int:
    return _joined(_argument(arguments, 0), size)


def _filter_join(value: object, size: int, arguments: list[object]) -> int:
    return _joined(value, size_of(_argument(arguments, 0) or ""))


def _joined(items: object, separator: int) -> int:
    number = len(items) if isinstance(items, str | bytes | list | tuple | Mapping) else _MAX_ITEMS
    return size_of(items) + number * separator


def _split(value: object, size: int, arguments: list[object]) -> int:
    separator = _argument(arguments, 0)
    text = str(value)
    return size + _OTHER * (text.count(separator) if isinstance(separator, str) and separator else len(text) // 2)


def _lines(value: object, size: int, arguments: list[object]) -> int:
    return size + _OTHER * len(re.findall(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", str(value)))


def _indented(value: object, size: int, arguments: list[object]) -> int:
    width = _argument(arguments, 0)
    each = len(width) if isinstance(width, str) else width if isinstance(width, int) else 4
    return size + each * (len(str(value).splitlines()) + 1)


def _wrapped(value: object, size: int, arguments: list[object]) -> int:
    return (size + 1) * (1 + max((len(each) for each in arguments if isinstance(each, str)), default=1))


def _translated(value: object, size: int, arguments: list[object]) -> int:
    table = _argument(arguments, 0)
    longest = max(map(size_of, table.values()), default=1) if isinstance(table, Mapping) else 1
    return size * max(1, longest)


def _json(value: object, size: int, arguments: list[object]) -> int:
    indent = max((each for each in arguments if isinstance(each, int) and not isinstance(each, bool)), default=0)
    if indent > 16 or any(len(each) > 16 for each in arguments if isinstance(each, str)):
        raise LimitReached("an indent of JSON is above 16")
    return size * 2 if not indent else size * 2 + size // _ITEM * indent * _depth(value)


def _listed(value: object, size: int, arguments: list[object]) -> int:
    return size * (_ITEM if isinstance(value, str) else 2)


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for item in level for inner in _items(item) or ()]
    return depth


#: Most items of what is not counted before it is made, such as a range.
_MAX_ITEMS = 100_000
_SIZES: dict[str, Callable[[object, int, list[object]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "truncate", "round", "to_bytes"), _width),
    "expandtabs": _tabs,
    "replace": _replaced,
    "join": _method_join,
    "join filter": _filter_join,
    **dict.fromkeys(("split", "rsplit"), _split),
    "splitlines": _lines,
    "indent": _indented,
    **dict.fromkeys(("wordwrap", "urlize", "xmlattr"), _wrapped),
    **dict.fromkeys(("format", "format_map"), lambda value, size, rest: _formatted(str(value), "{", rest)),
    "format filter": lambda value, size, rest: _formatted(str(value), "%", rest),
    "translate": _translated,
    "tojson": _json,
    **dict.fromkeys(
        ("list", "batch", "slice"), lambda value, size, rest: size * (_ITEM if isinstance(value, str) else 2)
    ),
    **dict.fromkeys(("urlencode", "escape", "e", "forceescape"), lambda value, size, rest: 9 * size),
    "encode": lambda value, size, rest: 4 * size,
}
