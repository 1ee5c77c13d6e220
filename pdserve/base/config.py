"""Loads a service's settings, once, from flags, environment and a TOML file: the only reader of the environment.

A service's settings are one frozen dataclass whose fields are made by `option`. A flag wins over the environment, the
environment over the file, the file over the default. Field `grpc_port` of service `router` is the variable
`PDSERVE_ROUTER__GRPC_PORT`; two underscores, because Kubernetes defines variables with one for its services.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from pdserve.base.errors import SetupError
from pdserve.base.flag_actions import JoinedLines, JoinedWords, OneFlagPerLine
from pdserve.base.option_values import parse_lines

T = TypeVar("T")
_SPEC = "option"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """The metadata of a field of a settings dataclass: how it is read and described."""

    help: str
    metavar: str | None = None
    #: The values allowed; empty: any.
    choices: tuple[str, ...] = ()
    #: Turns a string into the value where the type alone does not say how.
    parse: Callable[[str], Any] | None = None
    minimum: float | None = None
    #: An argument without a flag.
    positional: bool = False
    #: Whether the flag takes several words. `parse` gets them joined by spaces.
    several: bool = False
    #: Whether the flag may be given several times. `parse` gets the values as lines.
    repeated: bool = False


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    metavar: str | None = None,
    choices: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    minimum: float | None = None,
) -> Any:
    """A field of a settings dataclass, set by a flag of its name. The parameters are those of `OptionSpec`."""
    spec = OptionSpec(help=help, metavar=metavar, choices=tuple(choices), parse=parse, minimum=minimum)
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def positional(default: Any, *, help: str, metavar: str | None = None) -> Any:
    """A field that is set by an argument without a flag."""
    spec = OptionSpec(help=help, metavar=metavar, positional=True)
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def words_option(default: Any, *, help: str, parse: Callable[[str], Any], metavar: str | None = None) -> Any:
    """A field whose flag takes one or more words. `parse` gets them joined by spaces."""
    spec = OptionSpec(help=help, metavar=metavar, parse=parse, several=True)
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def repeated_option(
    default: Any = dataclasses.MISSING, *, help: str, metavar: str | None = None, positional: bool = False
) -> Any:
    """A field of texts: one for each time that its flag or argument is given, and for each line of its variable."""
    spec = OptionSpec(help=help, metavar=metavar, parse=parse_lines, positional=positional, repeated=True)
    return dataclasses.field(default=default, metadata={_SPEC: spec})


def option_spec(field: dataclasses.Field[Any]) -> OptionSpec:
    """The spec of a field that one of the functions above made."""
    spec: OptionSpec = field.metadata[_SPEC]
    return spec


def option_fields(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """The settings of a class, in the order in which they are shown: its own, then those of its base classes."""
    declared = {
        name: depth for depth, each in reversed([*enumerate(cls.__mro__)]) for name in inspect.get_annotations(each)
    }
    return sorted(dataclasses.fields(cls), key=lambda field: declared[field.name])


def default_of(cls: type[Any], name: str) -> Any:
    """The default of a field in another settings class, for a setting that is passed on to it."""
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)


def load(cls: type[T], service: str, argv: Sequence[str] | None = None, *, description: str | None = None) -> T:
    """The settings of this process. argparse exits on an unknown flag; everything else raises `SetupError`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {service}" if service.endswith("_svc") else f"pdserve {service}",
        description=description,
        formatter_class=OneFlagPerLine,
        # `--prefil 3` is a mistake, not an abbreviation.
        allow_abbrev=False,
    )
    add_options(parser, cls)
    return from_arguments(cls, service, parser.parse_intermixed_args(argv))


def add_options(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Adds a flag for every field of `cls`, and `--config`."""
    hints = typing.get_type_hints(cls)
    for field in option_fields(cls):
        spec = option_spec(field)
        flags = [field.name] if spec.positional else [_flag(field.name)]
        arguments: dict[str, Any] = {"help": _help_text(field), "default": None}
        if _base_type(hints[field.name]) is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["metavar"] = spec.metavar or field.name.rsplit("_", 1)[-1].upper()
        if spec.positional:
            arguments["nargs"] = "*" if spec.repeated else "?"
        if spec.several:
            arguments.update(nargs="+", action=JoinedWords)
        if spec.repeated:
            arguments["action"] = JoinedLines
        parser.add_argument(*flags, **arguments)
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
    prefix = f"PDSERVE_{service.removesuffix('_svc').replace(' ', '_').replace('-', '_').upper()}__"
    sources = [
        {_flag(name): value for name, value in vars(arguments).items() if value is not None},
        _from_environment(prefix, environment, fields),
        _read_file(getattr(arguments, "config", None) or environment.get(f"{prefix}CONFIG"), fields),
    ]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        keys = (_flag(name), prefix + name.upper(), f"{name} in the config file")
        given = next(((key, source[key]) for key, source in zip(keys, sources, strict=True) if key in source), None)
        if given is not None:
            values[name] = _convert(option_spec(field), hints[name], *given)
        elif field.default is dataclasses.MISSING:
            raise SetupError(
                f"{_flag(name)} is required: {option_spec(field).help}. "
                f"Set it there, as {prefix + name.upper()}, or in the config file."
            )
    return cls(**values)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help_text(field: dataclasses.Field[Any]) -> str:
    spec = option_spec(field)
    text = spec.help.replace("%", "%%")
    if spec.choices:
        text += f" ({', '.join(spec.choices)})"
    if field.default not in (dataclasses.MISSING, None, (), ""):
        words = map(str, field.default) if isinstance(field.default, tuple) else [str(field.default)]
        text += f" [default: {','.join(words)}]"
    return text


def _from_environment(prefix: str, environment: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the variable's name."""
    found = {name: value for name, value in environment.items() if name.startswith(prefix)}
    found.pop(f"{prefix}CONFIG", None)
    names = [name.removeprefix(prefix).lower() for name in found]
    _refuse_unknown(names, fields, where=f"the environment ({prefix}*)")
    return {prefix + name.upper(): value for name, value in zip(names, found.values(), strict=True)}


def _read_file(path: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values by "NAME in the config file"."""
    if not path:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"Cannot read the config file {path}: {error.strerror}. Check --config.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"The config file {path} is not valid TOML: {error}.") from error
    values = {name.replace("-", "_"): value for name, value in content.items()}
    _refuse_unknown(values, fields, where=f"the config file {path}")
    return {f"{name} in the config file": value for name, value in values.items()}


def _refuse_unknown(given: Iterable[str], fields: Mapping[str, Any], *, where: str) -> None:
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known settings: {', '.join(sorted(fields))}."
            raise SetupError(f"Unknown setting {name!r} in {where}. {hint}")


def _base_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return next(member for member in typing.get_args(hint) if member is not type(None))
    return hint


def _convert(spec: OptionSpec, hint: Any, where: str, value: Any) -> Any:
    base = _base_type(hint)
    try:
        converted = _parse(spec.parse, base, value)
    except (ValueError, TypeError) as error:
        raise SetupError(f"{where}: {error}.") from error
    if spec.choices and converted not in spec.choices:
        raise SetupError(f"{where} is {converted!r}, but must be one of {', '.join(spec.choices)}.")
    if spec.minimum is not None and converted < spec.minimum:
        raise SetupError(f"{where} is {converted}, but must be at least {spec.minimum}.")
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
        raise ValueError(f"{text!r} is not a switch; use one of {', '.join(words)}")
    return words[text.lower()]


def variable(name: str) -> str | None:
    """An environment variable that is not a setting of pdserve, such as NOTIFY_SOCKET or XDG_CACHE_HOME."""
    return os.environ.get(name)


def set_default_variable(name: str, value: str) -> None:
    """Sets a variable that a library reads when it is loaded, unless the user has set it."""
    os.environ.setdefault(name, value)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}
