"""docs/models.md has every field of a model's files, with the meaning that the code has for it."""

from __future__ import annotations

import json
import re

import pytest

from pdserve.model.fetch import gguf_keys
from pdserve.model.known_fields import FILES, KnownFields
from tests.arch.documents import read, section, table_rows

SECTIONS = {
    **FILES,
    "GGUF": gguf_keys.MODEL,
    "GGUF tokenizer": gguf_keys.TOKENIZER,
    "GGUF sampling": gguf_keys.SAMPLING,
}


def _names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_field_of_a_file_is_documented(heading: str) -> None:
    known: KnownFields = SECTIONS[heading]
    text = section("docs/models.md", heading)
    before, behind = text.split("| refused |")
    used, refused = table_rows(before), table_rows(f"| refused |{behind}")
    assert sorted(name for row in used for name in _names(row[0])) == sorted(known.used)
    found = {name: tuple(json.loads(value) for value in _names(row[1])) for row in refused for name in _names(row[0])}
    assert found == dict(known.refused)
    listed = re.split(r"\.\s", text.split("Without effect:")[1])[0]
    assert sorted(_names(listed)) == sorted(known.ignored)


def test_the_test_of_each_field_that_is_used_exists() -> None:
    rows = [row for heading in SECTIONS for row in table_rows(section("docs/models.md", heading)) if len(row) == 3]
    assert len(rows) > 20
    for fields, _, named in rows:
        path, _, name = named.strip("`").partition("::")
        assert re.search(rf"^(async )?def {name}\(", read(path), re.MULTILINE), f"{fields}: {named}"
