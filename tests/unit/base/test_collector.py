"""The collector pauses for imports, works afterwards, and leaves alone what was made before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pdserve.base.collector import exempt_all, importing


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def is_scanned(candidate: object) -> bool:
    return any(candidate is each for each in gc.get_objects())


def test_the_collector_pauses_for_imports_and_never_scans_what_they_made() -> None:
    with importing():
        assert not gc.isenabled()
        made = [object()]
        assert is_scanned(made)
    assert gc.isenabled()
    assert not is_scanned(made)


def test_it_is_back_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


class Garbage:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_is_exempt_and_garbage_is_not() -> None:
    lives: list[object] = []
    garbage = weakref.ref(Garbage())
    exempt_all()
    assert garbage() is None
    assert not is_scanned(lives)
