"""Errors of libraries written in Rust, whose panics are no `Exception`, as errors of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdserve.base.errors import RequestError, SetupError

#: The class that pyo3 raises for a panic. It cannot be imported, and derives from `BaseException`.
_PANIC = "PanicException"


@contextmanager
def library_errors(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Raises `error_of(reason)` in place of any error of calls into such a library, panics included."""
    try:
        yield
    except SetupError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise error_of(str(error).strip().rstrip(".") or type(error).__name__) from error


def unsplit(reason: str) -> RequestError:
    """The error for a text on which a step of the tokenizer gives up."""
    return RequestError(f"The model's tokenizer fails on this text: {reason}. Use another text or tokenizer.")
