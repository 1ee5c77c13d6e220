"""The console's files: one page, its styles and modules."""

from __future__ import annotations

from pathlib import Path

from router_svc.api.static_page import StaticPage

STATIC = Path(__file__).parent / "static"


def console_page() -> StaticPage:
    """/console and the files below it."""
    return StaticPage("/console", sorted(STATIC.iterdir()))
