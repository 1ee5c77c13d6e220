"""`python -m tests.support.fetch_model`: fetches the default model, so that the tests need no network.

`make install` runs it. Where the model cannot be had, it says why and does not fail: what needs the model fetches it.
"""

from __future__ import annotations

from pdserve.base.errors import SetupError
from pdserve.model.resolve import resolve_model


def main() -> None:
    """Prints where it is, or why it is not there."""
    try:
        print("Default model:", resolve_model().path)
    except SetupError as error:
        print("Default model: not fetched.", error)


if __name__ == "__main__":
    main()
