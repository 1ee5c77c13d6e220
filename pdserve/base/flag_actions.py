"""What argparse does with flags of several values, and how it shows help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class JoinedWords(argparse.Action):
    """Joins the words of a flag to one text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, " ".join(values or ()))


class JoinedLines(argparse.Action):
    """Joins the values of a flag that is given several times, or of several arguments, as lines of one text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        lines = [values] if isinstance(values, str) else [*(values or ())]
        before = getattr(namespace, self.dest)
        if lines:
            setattr(namespace, self.dest, "\n".join(lines if before is None else [before, *lines]))


class OneFlagPerLine(argparse.HelpFormatter):
    """One flag per line, with the text in a column to the right of the longest flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)
