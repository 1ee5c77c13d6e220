"""Writes the results of a benchmark: all samples as JSON, and a page for readers."""

from __future__ import annotations

import json
from pathlib import Path


def write_results(directory: Path, name: str, raw: object, markdown: str) -> None:
    """Writes `name`.json and `name`.md below `directory`, and prints their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    data, page = directory / f"{name}.json", directory / f"{name}.md"
    data.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown, encoding="utf-8")
    print(f"Written: {data} and {page}")
