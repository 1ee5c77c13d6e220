"""The code speaks the field's language: retired words do not come back, as names or at the head of a caption."""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = (
    "pdserve",
    "router_svc",
    "worker_svc",
    "prefill_svc",
    "decode_svc",
    "kvtransfer",
    "kernels",
    "tests",
    "benchmarks",
)
CPP = ("kernels/cpu/src",)
#: Each retired word with what the field says instead.
RETIRED = {
    **dict.fromkeys(("tell", "tells", "told", "untold"), "report, publish, notify, send"),
    **dict.fromkeys(("stem", "stems"), "prompt_sequence"),
    **dict.fromkeys(("stirred",), "must_rescan_waiting"),
    **dict.fromkeys(("moment", "moments"), "event"),
    **dict.fromkeys(("sibling", "siblings"), "backend"),
    **dict.fromkeys(("most",), "max"),
    **dict.fromkeys(("team", "teams"), "thread group, rank group"),
    **dict.fromkeys(("part", "parts"), "shard, chunk, segment, piece"),
    **dict.fromkeys(("place", "places"), "position, index, slot, location"),
    **dict.fromkeys(("begun", "began"), "started, started_at"),
    **dict.fromkeys(("beside",), "alongside, concurrent"),
    **dict.fromkeys(("asked",), "requested"),
    **dict.fromkeys(("drawn",), "sampled"),
    **dict.fromkeys(("house", "houses"), "cluster, package"),
    **dict.fromkeys(("whoever", "nobody", "somebody"), "the noun itself"),
    **dict.fromkeys(("apart",), "separate"),
    **dict.fromkeys(("kick", "kicked"), "schedule"),
    **dict.fromkeys(("mend", "mended"), "fix"),
    **dict.fromkeys(("books",), "record, metrics"),
}
#: Names that others own (libraries, wire formats, file formats), or of which the word is a fixed part.
OTHERS = {
    "most_common",  # collections.Counter
    "content_part",  # OpenAI's API
    "content_parts",
    "in_place",  # the field's terms
    "InPlace",
    "at_most",  # plain English
    "most_likely",
}
#: Names that a module needs because a library calls them so.
OF_LIBRARIES = {
    "router_svc/api/files/upload.py": {"BodyPartReader"},  # aiohttp
    "pdserve/cli/supervisor/child.py": {"tell"},  # io
    "pdserve/model/resolve.py": {"stem"},  # pathlib
    "router_svc/api/responses/answers.py": {"part"},  # a field of OpenAI's events
    "tests/arch/list_modules.py": {"parts"},
    "tests/deploy/render.py": {"stem"},  # pathlib
    "tests/deploy/test_kubernetes_overlays.py": {"stem"},  # pathlib
    "tests/deploy/test_kubernetes_renders.py": {"stem"},  # pathlib
    "tests/deploy/test_kubernetes_schemas.py": {"stem"},  # pathlib
    "tests/arch/test_purity.py": {"parts"},
    "tests/unit/cli/test_private_redis.py": {"parts"},
}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@functools.cache
def _retired(identifier: str) -> set[str]:
    bare = identifier
    for name in OTHERS:
        bare = bare.replace(name, "")
    return {word.lower() for word in _WORDS.findall(bare)} & RETIRED.keys()


def _python() -> Iterator[Path]:
    for folder in PYTHON:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name)


def _python_names(path: Path) -> set[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME}


def _cpp_names(path: Path) -> set[tuple[int, str]]:
    code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    lines = code.splitlines()
    return {(number, name) for number, line in enumerate(lines, 1) for name in re.findall(r"[A-Za-z_]\w*", line)}


def test_retired_words_stay_retired() -> None:
    found = []
    cpp = [path for folder in CPP for path in sorted((ROOT / folder).rglob("*.*"))]
    names = [(path, _python_names(path)) for path in _python()] + [(path, _cpp_names(path)) for path in cpp]
    for path, here in names:
        allowed = OF_LIBRARIES.get(str(path.relative_to(ROOT)), set())
        for line, name in sorted((line, name) for line, name in here if name not in allowed):
            where = f"{path.relative_to(ROOT)}:{line} {name}"
            found += [f"{where}: instead of {word!r}: {RETIRED[word]}" for word in sorted(_retired(name))]
    assert found == []


def test_captions_start_with_a_noun() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in _python()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r'(#: |""")Of [a-z`]', line)
    ]
    assert found == []


def test_the_check_sees_words_in_every_spelling() -> None:
    assert _retired("last_told") == {"told"}
    assert _retired("ModelPart") == {"part"}
    assert _retired("_MOST_ROWS") == {"most"}
    assert _retired("Counter") | _retired("partial") | _retired("replaced") | _retired("steam") == set()
    assert _retired("content_part") | _retired("most_common") == set()
