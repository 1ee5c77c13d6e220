"""compose/Dockerfile as data: its stages with their instructions."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from tests.deploy.compose_files import COMPOSE

TEXT = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")


@dataclass
class Stage:
    """One stage of the build."""

    name: str
    base: str
    #: Instruction and its text, in order.
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: str) -> list[str]:
        """The texts of the instructions of this kind."""
        return [text for name, text in self.instructions if name == kind]


def _lines() -> list[str]:
    code = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in re.sub(r"\\\n\s*", " ", code).splitlines() if line.strip()]


def stages() -> dict[str, Stage]:
    """The stages by name."""
    found: dict[str, Stage] = {}
    stage = None
    for line in _lines():
        kind, _, text = line.partition(" ")
        if kind == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", text).groups()  # type: ignore[union-attr]
            stage = found[name] = Stage(name, base)
        elif stage is not None:
            stage.instructions.append((kind, text.strip()))
    return found


def lineage(name: str) -> list[Stage]:
    """A stage and what it is built on, the first one first."""
    known = stages()
    result = []
    while name in known:
        result.insert(0, known[name])
        name = known[name].base
    return result


def arguments() -> dict[str, str]:
    """Defaults of the arguments that choose base images."""
    return dict(re.findall(r"^ARG (\w+)=(\S*)$", TEXT.split("\nFROM ")[0], re.MULTILINE))


def environment(target: str = "cuda") -> dict[str, str]:
    """Variables that the image sets."""
    words = [word for stage in lineage(target) for text in stage.of("ENV") for word in shlex.split(text)]
    return {name: value for name, _, value in (word.partition("=") for word in words)}
