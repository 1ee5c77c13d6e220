"""What a start has measured, the next one takes over, as long as all that it depends on has stayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.worker.load import kept_activations as module
from pdserve.worker.load.kept_activations import forget_activations, kept_activations
from pdserve.worker.load.memory_profile import Activations

SETTINGS: dict[str, object] = {"num_tokens": 4096, "device": ["H200", 1 << 37, None]}
MEASURED = Activations(peak=3 << 31, graphs=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pdserve" / "activations"


def never() -> Activations:
    raise AssertionError("it is kept")


def test_what_was_measured_is_kept_for_the_same_settings() -> None:
    assert kept_activations(SETTINGS, lambda: MEASURED) == (MEASURED, False)
    assert kept_activations(SETTINGS, never) == (MEASURED, True)
    other = Activations(peak=1, graphs=2)
    assert kept_activations({**SETTINGS, "num_tokens": 512}, lambda: other) == (other, False)
    assert kept_activations(SETTINGS, never) == (MEASURED, True)


def test_other_code_measures_again(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (name, text), *others = module._sources()
    assert {"kernels/triton/attention.py", "pdserve.base/sampling.py"} <= {name for name, _ in others}
    kept_activations(SETTINGS, lambda: MEASURED)
    monkeypatch.setattr(module, "_sources", lambda: iter([(name, text.swapcase()), *others]))
    smaller = Activations(peak=5, graphs=1)
    assert kept_activations(SETTINGS, lambda: smaller) == (smaller, False)
    assert kept_activations(SETTINGS, never) == (smaller, True)
    assert len(list(cache.iterdir())) == 1  # The file of other code is replaced.


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"peak": 1}', '{"code": "", "peak": "1", "graphs": 2}'])
def test_a_damaged_file_is_replaced(cache: Path, content: str) -> None:
    kept_activations(SETTINGS, lambda: MEASURED)
    [path] = cache.iterdir()
    path.write_text(content)
    assert kept_activations(SETTINGS, lambda: MEASURED) == (MEASURED, False)
    assert kept_activations(SETTINGS, never) == (MEASURED, True)


def test_what_was_too_small_is_forgotten() -> None:
    kept_activations(SETTINGS, lambda: MEASURED)
    forget_activations()
    forget_activations()
    assert kept_activations(SETTINGS, lambda: MEASURED) == (MEASURED, False)


def test_where_nothing_can_be_written_it_is_measured_each_time(cache: Path) -> None:
    cache.parent.write_text("a file where the directory would be")
    for _ in range(2):
        assert kept_activations(SETTINGS, lambda: MEASURED) == (MEASURED, False)
