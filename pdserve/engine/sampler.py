"""Logits -> tokens. A token is a pure function of its row of logits and its `SampleRow`, without generator state.

Log-probabilities are those of the raw logits. Bias, penalties and bans come next. Then greedy rows take the maximum;
others are truncated by min_p, top_k and top_p, and the largest sum of scaled logit and Gumbel noise wins. All ties go
to the lowest token id. Each row is computed by itself, and sums whose order could matter are sums of integers. Tokens
that cannot win are dropped early, which saves most of the work with a vocabulary of 50,000.

This is the definition, in numpy. The C++ kernels find the same tokens (`pdserve/engine/cpu_sampler.py`). What decides
is computed with `pdserve/engine/elementary.py`; numpy's own functions, which are faster, only exclude tokens.
The only sum of floats is the total of a log-probability. Its order is that of numpy: while there are more than 128
numbers, the sum of two halves, the first rounded down to a multiple of eight; then eight interleaved sums, added in
pairs of neighbours, and the rest one by one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from math import isfinite

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pdserve.base.logs import get_logger
from pdserve.base.sampling import SamplingParams, TokenLogprobs
from pdserve.engine import elementary
from pdserve.engine.logits import Ids, Logits, descending, edited_logits, head
from pdserve.engine.philox import MAX_GUMBEL, MIN_GUMBEL, GumbelNoise, exact_gumbel, gumbel, min_word
from pdserve.engine.sequence import Fault, Sampled, SampleFailure, SampleResult, SampleRow, unprepared

log = get_logger(__name__)

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]

#: Unit of integer probabilities: 2**-32 of the most likely token's.
_WEIGHT_UNITS = 2.0**32
#: Distance from the largest scaled logit beyond which no noise lets a token win. Its integer probability is 0, too.
_MAX_DISTANCE = MAX_GUMBEL - MIN_GUMBEL + 0.1
#: Distance from the largest scaled logit of the tokens that are considered first.
_NEAR = 6.0
#: Bins per unit of scaled logits, into which top_p divides them before it sorts one of the bins.
_BINS_PER_UNIT = 16.0
#: Difference of scores that is decided by their exact values.
_CLOSE = 1e-9


class Sampler:
    """Stateless; one instance per worker."""

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """One result per row, in order.

        `logits`: float32 [num_logits, vocab], not modified; row i is sampled from `logits[logits_rows[i]]`.
        """
        table: Logits = logits.cpu().numpy()
        best_ids = table.argmax(axis=1).tolist()  # NaN counts as the largest; of equal ones the first is returned.
        results: list[SampleResult] = []
        for row, index in zip(rows, logits_rows, strict=True):
            best_id = best_ids[index]
            if not isfinite(table.item(index, best_id)):
                results.append(failure(row))
            elif row.is_argmax:
                results.append(Sampled(token_id=best_id))
            else:
                results.append(_sample_or_fail(table[index], row))
        return results

    def wait_for_step(self) -> None:
        """Nothing to wait for: on a CPU a step has ended when its call returns."""


def _sample_or_fail(raw: Logits, row: SampleRow) -> SampleResult:
    """As `_sample_row`. A row that raises an error fails alone; only a lack of memory is the worker's."""
    try:
        return _sample_row(raw, row)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's
        log.error("row_not_sampled", exc=error)
        return unprepared(error)


def _sample_row(raw: Logits, row: SampleRow) -> SampleResult:
    """The result of one row, whose logits `raw` have a finite maximum."""
    logits = edited_logits(raw, row)
    token_id = int(logits.argmax())
    if not isfinite(logits[token_id]):
        return failure(row)
    if row.params.temperature > 0:
        token_id = _sample_token(logits, float(logits[token_id]), row)
    return Sampled(
        token_id=token_id, logprobs=None if row.params.logprobs is None else _logprobs(raw, token_id, row.params)
    )


def failure(row: SampleRow) -> SampleFailure:
    """The result of a row from which no token can be sampled."""
    if _allows_nothing(row):
        reason = f"its grammar, allowed_token_ids and bad_words together allow no token at position {row.position}"
        return SampleFailure(reason=reason, fault=Fault.REQUEST)
    return SampleFailure(reason=f"the logits of token {row.position} have no finite maximum")


def _allows_nothing(row: SampleRow) -> bool:
    if (allowed := row.allowed()) is None:
        return False
    ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
    return {*ids.tolist()} <= {*row.banned}


def _sample_token(logits: Logits, best: float, row: SampleRow) -> int:
    """The token with the largest (logit / temperature + noise) among those that truncation keeps."""
    params = row.params
    noise = GumbelNoise(params.seed, row.choice_index, row.position)
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _sample_from_all(logits, best, params.temperature, noise)
    ids = _within(logits, best, _MAX_DISTANCE * params.temperature)
    ids, scaled = _truncate(logits, ids, _scale(logits[ids], best, params.temperature), params)
    return int(ids[0]) if len(ids) == 1 else _best(ids, scaled, noise.words_of(ids))


def _sample_from_all(logits: Logits, best: float, temperature: float, noise: GumbelNoise) -> int:
    """As `_sample_token`, without truncation: words for all tokens, scores only for those that can beat the best."""
    words = noise.words_of_vocabulary(len(logits))
    near = _within(logits, best, _NEAR * temperature)
    best_near = (_scale(logits[near], best, temperature) + gumbel(words[near])).max()
    far = np.flatnonzero(words >= min_word(best_near + _NEAR))
    ids = np.concatenate((near, far))
    return _best(ids, _scale(logits[ids], best, temperature), words[ids])


def _within(logits: Logits, best: float, distance: float) -> Ids:
    """Ascending ids of all tokens whose logit is at most `distance` below the best, and of a few slightly below."""
    return np.flatnonzero(logits >= np.float32(best - distance - 1e-6 * (abs(best) + distance)))


def _scale(logits: Logits, best: float, temperature: float) -> Floats:
    """(logit - largest logit) / temperature in double precision; minus infinity where that is too large for it."""
    with np.errstate(over="ignore"):
        return (logits.astype(np.float64) - best) / temperature


def _truncate(logits: Logits, ids: Ids, scaled: Floats, params: SamplingParams) -> tuple[Ids, Floats]:
    """The tokens that min_p, top_k and top_p keep of `ids`, which ascend, and their scaled logits, at most 0.

    Each keeps a head of the descending order: min_p and top_k first, then top_p the smallest head that holds `top_p` of
    the probability that is left.
    """
    if params.min_p > 0.0:
        likely = _probabilities(scaled, near=min(params.min_p, 1.0)) >= min(params.min_p, 1.0)
        ids, scaled = ids[likely], scaled[likely]
    if 0 < params.top_k < len(ids):
        kept = head(logits[ids], params.top_k)
        ids, scaled = ids[kept], scaled[kept]
    if params.top_p < 1.0:
        kept = _nucleus(logits[ids], scaled, params.top_p)
        ids, scaled = ids[kept], scaled[kept]
    return ids, scaled


def _nucleus(logits: Logits, scaled: Floats, top_p: float) -> Ids:
    """Indices of the smallest head that holds `top_p` of the probability, at least one."""
    # Probabilities up to a factor, as integers: their sums are exact in any order, and in double precision.
    weights = _weights(scaled)
    wanted = float(weights.sum()) * top_p
    # Bins in descending order, so that only the bin in which the head ends has to be sorted.
    bins = (np.minimum(-scaled, _MAX_DISTANCE) * _BINS_PER_UNIT).astype(np.int64)
    masses = np.bincount(bins, weights=weights).cumsum()
    last = int(np.searchsorted(masses, wanted)) if wanted > 0 else 0
    inside = np.flatnonzero(bins < last)
    border = np.flatnonzero(bins == last)
    border = border[descending(logits[border])]
    before = weights[border].cumsum() - weights[border] + weights[inside].sum()
    num_kept = max(int((before < wanted).sum()), 1 if not len(inside) else 0)
    return np.concatenate((inside, border[:num_kept]))


def _probabilities(scaled: Floats, near: float) -> Floats:
    """e^scaled, exact at values around `near`."""
    values: Floats = np.exp(scaled)
    unsure = np.flatnonzero(np.abs(values - near) <= near * elementary.TOLERANCE)
    values[unsure] = elementary.exp(scaled[unsure])
    return values


def _weights(scaled: Floats) -> Ids:
    """The integer parts of e^scaled in `_WEIGHT_UNITS`."""
    values = np.exp(scaled) * _WEIGHT_UNITS
    weights: Ids = values.astype(np.int64)
    unsure = np.flatnonzero(np.abs(values - np.rint(values)) <= _WEIGHT_UNITS * elementary.TOLERANCE)
    weights[unsure] = (elementary.exp(scaled[unsure]) * _WEIGHT_UNITS).astype(np.int64)
    return weights


def _best(ids: Ids, scaled: Floats, words: Words) -> int:
    """The id with the largest score, which is scaled logit plus noise; the lowest id of equal ones."""
    scores = scaled + gumbel(words)
    close = np.flatnonzero(scores >= scores.max() - _CLOSE)
    if len(close) == 1:
        return int(ids[close[0]])
    exact = scaled[close] + exact_gumbel(words[close])
    return int(ids[close[exact == exact.max()]].min())


def _logprobs(raw: Logits, token_id: int, params: SamplingParams) -> TokenLogprobs:
    """Log-probabilities of the token and of those to be reported with it, from the model's raw logits."""
    best = float(raw.max())
    log_total = best + float(elementary.log(elementary.exp(raw.astype(np.float64) - best).sum(keepdims=True))[0])
    top = head(raw, params.logprobs or 0)
    chosen = raw[token_id]
    found = TokenLogprobs(
        logprob=float(chosen) - log_total,
        rank=1 + int((raw > chosen).sum()) + int((raw[:token_id] == chosen).sum()),
        top_ids=tuple(top.tolist()),
        top_logprobs=tuple((raw[top].astype(np.float64) - log_total).tolist()),
    )
    return with_listed(found, params, logprobs_of(raw, params, log_total))


def logprobs_of(raw: Logits, params: SamplingParams, log_total: float) -> list[float]:
    """Log-probabilities of the row's `logprob_token_ids`. `log_total`: logarithm of the sum of all exponentials."""
    logprobs: list[float] = (raw[[*params.logprob_token_ids]].astype(np.float64) - log_total).tolist()
    return logprobs


def with_listed(found: TokenLogprobs, params: SamplingParams, logprobs: Items[float]) -> TokenLogprobs:
    """`found` with those of the row's `logprob_token_ids` that are not among the likeliest ones."""
    if not params.logprob_token_ids:
        return found
    top = dict(zip(found.top_ids, found.top_logprobs, strict=True))
    for token_id, logprob in zip(params.logprob_token_ids, logprobs, strict=True):
        top.setdefault(token_id, logprob)
    return replace(found, top_ids=tuple(top), top_logprobs=tuple(top.values()))
