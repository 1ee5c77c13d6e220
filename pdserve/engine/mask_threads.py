"""Finds what grammars allow next on threads of their own, while a step is computed.

A grammar that makes this take long delays the rows that it belongs to, and no others: what is not found when the step
has been computed is waited for briefly, and then the row is computed again in the next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor

from pdserve.base.logs import get_logger
from pdserve.engine.sequence import DELAYED, SampleResult, SampleRow

log = get_logger(__name__)

#: More than one, so that a grammar that takes long does not delay the others. Threads are only made when needed.
_MAX_THREADS = 4
#: Time that a computed step waits for what has not been found: as much as the masks of hundreds of rows take.
_PATIENCE_S = 0.02


class MaskThreads:
    """Used on the step thread, for one step after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, "masks")
        self._rows: list[SampleRow] = []
        self._job: Future[list[SampleRow]] | None = None

    def start(self, rows: Items[SampleRow]) -> None:
        """Begins with those of the rows that have a grammar."""
        self._rows = [row for row in rows if row.grammar is not None]
        self._job = self._pool.submit(_find, self._rows) if self._rows else None

    def late(self) -> list[SampleRow]:
        """The rows for which it is not found yet what may follow. Waits for them, but not for long each time."""
        if self._job is None:
            return []
        broken: list[SampleRow] = []
        with contextlib.suppress(TimeoutError):
            broken = self._job.result(_PATIENCE_S)
        # Also those that the job has passed over, because a thread of an earlier step still looks for them.
        return [row for row in self._rows if not row.is_found and not any(row is each for each in broken)]


def sampled_but(
    late: Collection[SampleRow],
    rows: Items[SampleRow],
    logits_rows: Items[int],
    sample: Callable[[Items[SampleRow], Items[int]], list[SampleResult]],
) -> list[SampleResult]:
    """The results of `sample` for all rows but those that are late, which are delayed."""
    if not late:
        return sample(rows, logits_rows)
    delayed = set(map(id, late))
    indexes = [index for index, row in enumerate(rows) if id(row) not in delayed]
    results: list[SampleResult] = [DELAYED] * len(rows)
    sampled = sample([rows[index] for index in indexes], [logits_rows[index] for index in indexes]) if indexes else []
    for index, result in zip(indexes, sampled, strict=True):
        results[index] = result
    return results


def _find(rows: Items[SampleRow]) -> list[SampleRow]:
    """Returns those for which that has failed: samplers will find the same error, and end these requests alone."""
    broken = []
    for row in rows:
        try:
            row.find_allowed()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's
            log.error("mask_not_found", exc=error)
            broken.append(row)
    return broken
