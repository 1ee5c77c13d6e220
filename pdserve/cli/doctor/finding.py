"""A finding of `pdserve doctor`, and the exit status that findings lead to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """What a finding means for service. Larger is worse."""

    #: Nothing to do.
    OK = 0
    #: Worth knowing.
    INFO = 1
    #: Slower or less safe than it could be, or soon a problem.
    WARNING = 2
    #: Requests fail, or will.
    ERROR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check."""

    severity: Severity
    #: Name of the check, stable across versions.
    check: str
    #: What was looked at: a worker's id, "redis", or "this machine".
    subject: str
    #: What was found, with the numbers.
    found: str
    #: What to do; empty when there is nothing to do.
    remedy: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """0: nothing to do; 1: warnings; 2: errors."""
    worst = max((finding.severity for finding in findings), default=Severity.OK)
    return {Severity.WARNING: 1, Severity.ERROR: 2}.get(worst, 0)


def ok(check: str, subject: str, found: str) -> Finding:
    """A check that passed."""
    return Finding(severity=Severity.OK, check=check, subject=subject, found=found)


def info(check: str, subject: str, found: str, remedy: str = "") -> Finding:
    """Something worth knowing."""
    return Finding(severity=Severity.INFO, check=check, subject=subject, found=found, remedy=remedy)


def warning(check: str, subject: str, found: str, remedy: str) -> Finding:
    """Something that should be changed."""
    return Finding(severity=Severity.WARNING, check=check, subject=subject, found=found, remedy=remedy)


def error(check: str, subject: str, found: str, remedy: str) -> Finding:
    """Something that has to be changed."""
    return Finding(severity=Severity.ERROR, check=check, subject=subject, found=found, remedy=remedy)
