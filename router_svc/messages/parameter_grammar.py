"""The grammar of arguments that are written one by one, and not as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router_svc.messages.lark import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An argument. Without grammars it is text, or one of `options`."""

    name: str
    is_required: bool
    grammars: Sequence[Mapping[str, Any]] = ()
    options: Sequence[str] = ()


class ParameterRules:
    """Makes the rules of tools' parameters, in the order of their schemas."""

    def __init__(self, delimiters: tuple[str, str, str], lines: list[str], grammars: list[Mapping[str, Any]]) -> None:
        """`delimiters`: before the name, before the value, behind it. `lines`, `grammars`: where rules are added."""
        self._before, self._between, self._behind = delimiters
        self._lines = lines
        self._grammars = grammars
        self._count = 0

    def of_tool(self, parameters: Sequence[Parameter]) -> str:
        """A sequence for a rule: all parameters that are required, and any of the others."""
        return " ".join(self._of(parameter) for parameter in parameters)

    def _of(self, parameter: Parameter) -> str:
        name = f"parameter_{self._count}"
        self._count += 1
        opening = quoted(self._before + parameter.name + self._between)
        if parameter.grammars:
            self._grammars += [{**parameter.grammars[0], "name": name}, *parameter.grammars[1:]]
            value = f"@{name} {quoted(self._behind)}"
        elif parameter.options:
            options = " | ".join(map(quoted, parameter.options))
            value = f"({options}) {quoted(self._behind)}"
        else:
            self._lines.append(f"{name}[lazy]: TEXT {quoted(self._behind)}")
            value = name
        return f"{opening} {value}" if parameter.is_required else f"({opening} {value})?"
