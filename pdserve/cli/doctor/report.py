"""The findings of `pdserve doctor` as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pdserve.cli.doctor.facts import PairProbe
from pdserve.cli.doctor.finding import Finding, Severity, exit_status

_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan", Severity.OK: "green"}
_LABEL_CELLS = len("warning")


def render(findings: Sequence[Finding]) -> RenderableType:
    """One paragraph per finding, the worst first, and a line that counts them."""
    ordered = sorted(findings, key=lambda finding: -finding.severity)
    return Group(*(line for finding in ordered for line in _lines(finding)), Text(), _summary(findings))


def as_json(findings: Sequence[Finding], pairs: Sequence[PairProbe]) -> str:
    """The findings and the measured pairs as one JSON object."""
    content = {
        "status": exit_status(findings),
        "findings": [
            {**asdict(finding), "severity": finding.severity.name.lower()}
            for finding in sorted(findings, key=lambda finding: -finding.severity)
        ],
        "pairs": [asdict(pair) for pair in pairs],
    }
    return json.dumps(content, indent=2)


def show(findings: Sequence[Finding]) -> None:
    """Prints the findings."""
    Console(highlight=False).print(render(findings))


def _lines(finding: Finding) -> list[RenderableType]:
    label = finding.severity.name.lower()
    first = Text(f"{label:<{_LABEL_CELLS}}  ", style=_STYLES[finding.severity])
    first.append(f"{finding.subject}: {finding.found}", style="default")
    if not finding.remedy:
        return [first]
    return [first, Padding(Text(finding.remedy, style="dim"), (0, 0, 0, _LABEL_CELLS + 2))]


def _summary(findings: Sequence[Finding]) -> Text:
    counts = [(severity, sum(finding.severity is severity for finding in findings)) for severity in reversed(Severity)]
    names = {Severity.ERROR: "errors", Severity.WARNING: "warnings", Severity.INFO: "notes", Severity.OK: "ok"}
    return Text(", ".join(f"{count} {names[severity]}" for severity, count in counts))
