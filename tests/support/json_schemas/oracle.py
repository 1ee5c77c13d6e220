"""Whether a text is JSON that a schema accepts, by the `jsonschema` library with exact decimals and all formats."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import re
import uuid
from decimal import Decimal, localcontext
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from jsonschema import FormatChecker, validators

_formats = FormatChecker(formats=())
_HOST_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.I | re.A)
_MAX_EXPONENT = 400
_ASCII_CLASSES = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}
_DURATION = re.compile(
    r"P(?=.)(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)?(T(?=.)(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?)", re.A
)


@_formats.checks("date", ValueError)
def _is_date(text: object) -> bool:
    if not isinstance(text, str):
        return True
    # Python's calendar has no year 0, which RFC 3339 has, as a leap year.
    dt.date.fromisoformat(re.sub(r"\A0000", "2000", text))
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.A) is not None


@_formats.checks("time")
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or _TIME.fullmatch(text) is not None


@_formats.checks("date-time", ValueError)
def _is_date_time(text: object) -> bool:
    return not isinstance(text, str) or (text[10:11] in ("T", "t") and _is_date(text[:10]) and _is_time(text[11:]))


@_formats.checks("duration")
def _is_duration(text: object) -> bool:
    return not isinstance(text, str) or _DURATION.fullmatch(text) is not None


@_formats.checks("hostname")
def _is_hostname(text: object) -> bool:
    return not isinstance(text, str) or re.fullmatch(rf"{_HOST_LABEL}(\.{_HOST_LABEL})*", text) is not None


@_formats.checks("email")
def _is_email(text: object) -> bool:
    if not isinstance(text, str):
        return True
    local, _, domain = text.rpartition("@")
    atom = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    is_literal = domain.startswith("[") and domain.endswith("]")
    return re.fullmatch(rf"{atom}(\.{atom})*", local) is not None and (is_literal or _is_hostname(domain))


@_formats.checks("ipv4", ValueError)
def _is_ipv4(text: object) -> bool:
    return not isinstance(text, str) or ipaddress.IPv4Address(text) is not None


@_formats.checks("ipv6", ValueError)
def _is_ipv6(text: object) -> bool:
    return not isinstance(text, str) or (ipaddress.IPv6Address(text) is not None and "%" not in text)


@_formats.checks("uuid", ValueError)
def _is_uuid(text: object) -> bool:
    return not isinstance(text, str) or str(uuid.UUID(text)) == text.lower()


@_formats.checks("uri", ValueError)
def _is_uri(text: object) -> bool:
    if not isinstance(text, str):
        return True
    return bool(urlsplit(text).scheme) and re.fullmatch(r"[!#-;=?-\[\]_a-z~%A-Z]+", text) is not None


#: The formats that a grammar enforces.
FORMATS = tuple(sorted(_formats.checkers))


def _is_integer(_checker: object, value: object) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _pattern(_validator: object, pattern: str, value: object, _schema: object) -> Any:
    if isinstance(value, str) and not re.search(_in_python(pattern), value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _in_python(pattern: str) -> str:
    """A pattern of ECMA 262, whose digits and words are ASCII and whose `$` is the end, as Python writes it.

    Within brackets there may be no negated class.
    """
    made, index, is_in_class = "", 0, False
    while index < len(pattern):
        sign = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        index += len(sign)
        if sign in "[]":
            is_in_class = sign == "["
        ascii_class = _ASCII_CLASSES.get(sign.lower())
        if ascii_class is not None:
            sign = ascii_class if is_in_class else f"[{'^' if sign[1].isupper() else ''}{ascii_class}]"
        made += r"\Z" if sign == "$" and not is_in_class else sign
    return made


_Validator = validators.extend(
    jsonschema.Draft202012Validator,
    validators={"pattern": _pattern},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


class Oracle:
    """Judges texts by one schema."""

    def __init__(self, schema: Any) -> None:
        """Raises `jsonschema.SchemaError` for what is no schema, or refers to itself without end."""
        _Validator.check_schema(schema)
        self._validator = _Validator(_exact(json.dumps(schema)), format_checker=_formats)
        try:
            for text in ("null", "true", "1", '""', "[]", "{}"):
                self.accepts(text)
        except RecursionError as error:
            raise jsonschema.SchemaError("it refers to itself without end") from error

    def accepts(self, text: str) -> bool:
        """Whether the text is JSON that the schema accepts. Of equal names, the last one counts."""
        try:
            with localcontext(prec=1000):
                return bool(self._validator.is_valid(_exact(text)))
        except ValueError:
            return False


def _exact(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_float=_decimal, parse_constant=refuse)


def _decimal(text: str) -> Decimal:
    """The number, with an exponent that has few digits."""
    mantissa, _, exponent = text.lower().partition("e")
    return Decimal(mantissa).scaleb(max(-_MAX_EXPONENT, min(_MAX_EXPONENT, int(exponent or "0"))))
