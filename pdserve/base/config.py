"""Loads a service's settings, once, from flags, environment and a TOML file: the only reader of the environment.

A service's settings are one frozen dataclass whose fields are made by `option`. A flag wins over the environment, the
environment over the file, the file over the default. The environment name of field `grpc_port` of service `router` is
`PDSERVE_ROUTER__GRPC_PORT`; the two underscores keep it apart from the names Kubernetes makes up for its services.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from pdserve.base.errors import SetupError

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    metavar: str | None = None,
    choices: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    positional: bool = False,
    minimum: float | None = None,
    several: bool = False,
) -> Any:
    """A field of a settings dataclass; `parse` turns a string into the value when the type alone does not say how.

    The flag of one with `several` takes one or more words; `parse` gets them with spaces between.
    """
    metadata = {
        "help": help,
        "metavar": metavar,
        "choices": tuple(choices),
        "parse": parse,
        "positional": positional,
        "minimum": minimum,
        "several": several,
    }
    return dataclasses.field(default=default, metadata=metadata)


def default_of(cls: type[Any], name: str) -> Any:
    """The default of another settings class's field, for a setting that is passed on to it."""
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)


def parse_bytes(text: str) -> int:
    """A size such as `2GiB`, `512MiB`, `1.5G` or `1000000` in bytes."""
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{text!r} is not a size; write for example 2GiB or 512MiB") from error


def parse_ints(text: str) -> tuple[int, ...]:
    """Comma-separated numbers and ranges: `0,2-3` is (0, 2, 3)."""
    values: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            values.extend(range(int(first), int(last) + 1) if dash else [int(first)])
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers and ranges such as 0,2-3") from None
    return tuple(values)


def load(cls: type[T], service: str, argv: Sequence[str] | None = None, *, description: str | None = None) -> T:
    """Builds `cls` for this process. argparse ends it on a wrong flag; `SetupError` for the rest."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {service}" if service.endswith("_svc") else f"pdserve {service}",
        description=description,
        formatter_class=_HelpFormatter,
        # `--prefil 3` is a mistake, not an abbreviation.
        allow_abbrev=False,
    )
    add_options(parser, cls)
    return from_arguments(cls, service, parser.parse_args(argv))


def add_options(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Adds a flag for every field of `cls`, and `--config`."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flags = [field.name] if field.metadata["positional"] else [f"--{field.name.replace('_', '-')}"]
        settings: dict[str, Any] = {"help": _help_text(field), "default": None}
        if _base_type(hints[field.name]) is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = field.metadata["metavar"] or field.name.rsplit("_", 1)[-1].upper()
        if field.metadata["positional"]:
            settings["nargs"] = "?"
        if field.metadata["several"]:
            settings.update(nargs="+", action=_Joined)
        parser.add_argument(*flags, **settings)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with any of these settings; flags and environment win"
    )


def from_arguments(
    cls: type[T], service: str, arguments: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> T:
    """Merges parsed flags, environment and file into `cls`. Raises `SetupError` naming the setting that is wrong."""
    environment = os.environ if environment is None else environment
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"PDSERVE_{service.removesuffix('_svc').replace(' ', '_').upper()}__"
    from_file = _read_file(getattr(arguments, "config", None) or environment.get(f"{prefix}CONFIG"), fields)
    from_environment = {
        name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)
    }
    from_environment.pop("config", None)
    _refuse_unknown(from_environment, fields, where=f"the environment ({prefix}*)")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        flag = getattr(arguments, name, None)
        sources = ((f"--{name.replace('_', '-')}", flag), (prefix + name.upper(), from_environment.get(name)))
        given = next(((where, value) for where, value in sources if value is not None), None)
        if given is None and name in from_file:
            given = (f"{name} in the config file", from_file[name])
        if given is not None:
            values[name] = _convert(field, hints[name], *given)
        elif field.default is dataclasses.MISSING:
            raise SetupError(f"--{name.replace('_', '-')} is required: {field.metadata['help']}.")
    return cls(**values)


class _Joined(argparse.Action):
    """Keeps the words of a flag as one text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, " ".join(values or ()))


class _HelpFormatter(argparse.HelpFormatter):
    """One flag per line, text in a column that leaves room for our longest flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


HelpFormatter = _HelpFormatter


def _help_text(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if field.metadata["choices"]:
        text += f" ({', '.join(field.metadata['choices'])})"
    if field.default not in (dataclasses.MISSING, None, (), ""):
        words = map(str, field.default) if isinstance(field.default, tuple) else [str(field.default)]
        text += f" [default: {','.join(words)}]"
    return text


def _read_file(path: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not path:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"Cannot read the config file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"The config file {path} is not valid TOML: {error}.") from error
    values = {name.replace("-", "_"): value for name, value in content.items()}
    _refuse_unknown(values, fields, where=f"the config file {path}")
    return values


def _refuse_unknown(given: Mapping[str, Any], fields: Mapping[str, Any], *, where: str) -> None:
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(fields))}."
            raise SetupError(f"Unknown setting {name!r} in {where}.{hint}")


def _base_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _convert(field: dataclasses.Field[Any], hint: Any, where: str, value: Any) -> Any:
    base = _base_type(hint)
    try:
        converted = _parse(field.metadata["parse"], base, value)
    except (ValueError, TypeError) as error:
        raise SetupError(f"{where}: {error}.") from error
    if field.metadata["choices"] and converted not in field.metadata["choices"]:
        raise SetupError(f"{where}: {converted!r} is not one of {', '.join(field.metadata['choices'])}.")
    minimum = field.metadata["minimum"]
    if minimum is not None and converted < minimum:
        raise SetupError(f"{where}: {converted} is less than {minimum}.")
    return converted


def _parse(parse: Callable[[str], Any] | None, base: Any, value: Any) -> Any:
    if isinstance(value, str):
        if parse is not None:
            return parse(value)
        if base is bool:
            return _parse_bool(value)
        if base in (int, float):
            return _parse_number(base, value)
        if base is Path:
            return Path(value)
        return value
    origin = typing.get_origin(base) or base
    if origin is tuple:
        return tuple(value)
    if origin is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise ValueError(f"{value!r} is not of type {origin.__name__}")
    return value


def _parse_number(base: type[int] | type[float], text: str) -> int | float:
    try:
        return base(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if base is int else ''}number") from None


def _parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is not one of {', '.join(words)}")
    return words[text.lower()]


def variable(name: str) -> str | None:
    """One variable of the environment that is not a setting of ours (NOTIFY_SOCKET, XDG_CACHE_HOME, ...)."""
    return os.environ.get(name)


def set_default_variable(name: str, value: str) -> None:
    """Sets a variable that a library reads while it is loaded, unless the user has set it."""
    os.environ.setdefault(name, value)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}
