"""The names of several models in settings: one for each directory, and aliases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from pdserve.base.errors import SetupError


def models_by_name(directories: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    """The directories by their names, which are the directories' own if none are given. Raises `SetupError`."""
    if not directories:
        raise SetupError("There is no model. Give the directory of one with --model.")
    if names and len(names) != len(directories):
        raise SetupError(
            f"There are {len(directories)} models, but --served-model-name is given {len(names)} times. Give each "
            "model one name, in the same order, or no model a name. Further names are set with --alias NAME=MODEL."
        )
    found: dict[str, Path] = {}
    for name, directory in zip(names or [directory.name for directory in directories], directories, strict=True):
        if name in found:
            raise SetupError(
                f"Two models have the name {name!r}: {found[name]} and {directory}. Give them different ones with "
                "--served-model-name."
            )
        found[name] = directory
    return found


def models_by_alias(aliases: Sequence[str], models: Collection[str]) -> dict[str, str]:
    """The model of each alias, which is written NAME=MODEL. Raises `SetupError`."""
    found: dict[str, str] = {}
    for text in aliases:
        alias, is_pair, model = text.partition("=")
        if not (alias and is_pair and model):
            raise SetupError(f"--alias {text!r} is not of the form NAME=MODEL.")
        if model not in models:
            raise SetupError(f"--alias {text}: there is no model {model!r}. The models are: {', '.join(models)}.")
        if alias in models or found.setdefault(alias, model) != model:
            raise SetupError(f"--alias {text}: the name {alias!r} already belongs to another model. Choose another.")
    return found
