"""Changes to a row of logits before sampling (bias, penalties, bans, grammar), and a sort order without ties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdserve.engine.sequence import SampleRow

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

#: Distances from the largest logit within which `head` looks for its tokens, tried in this order.
_DEPTHS = tuple(np.float32(depth) for depth in (2, 4, 8, 16))


def edited_logits(logits: Logits, row: SampleRow) -> Logits:
    """A row [vocab] with bias, penalties, bans and grammar applied; the same array when there is nothing to apply.

    The repetition penalty applies to tokens of prompt and output, the presence and frequency penalties to the output's.
    """
    params, banned, allowed = row.params, row.banned, row.allowed()
    if not (params.logit_bias or row.penalizes or banned or allowed is not None):
        return logits
    logits = logits.copy()
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        logits[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
    if row.penalizes:
        tokens = np.array(row.tokens, dtype=np.int64)  # A copy: a view would keep the array from growing.
        if params.repetition_penalty != 1.0:
            seen = logits[tokens]
            # A token that occurs twice is written twice with the same value.
            logits[tokens] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        ids, counts = np.unique(tokens[row.num_prompt :], return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[ids] -= penalties.astype(np.float32)
    if banned:
        logits[list(banned)] = -np.inf
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), count=len(logits), bitorder="little")
        logits[bits == 0] = -np.inf
    return logits


def descending(logits: Logits) -> Ids:
    """Indices that sort the logits in descending order; equal ones stay in order."""
    return np.argsort(-logits, kind="stable")  # -0.0 equals 0.0 here, too.


def head(logits: Logits, count: int) -> Ids:
    """The first `count` indices of `descending`, without sorting much smaller logits. The largest logit is finite."""
    if count == 0:
        return np.zeros(0, np.int64)
    best = logits.max()
    for depth in _DEPTHS:
        near = np.flatnonzero(logits >= best - depth)
        if len(near) >= count:
            break
    else:
        count = min(count, len(logits))
        near = np.flatnonzero(logits >= np.partition(logits, len(logits) - count)[len(logits) - count])
    return near[descending(logits[near])[:count]]
