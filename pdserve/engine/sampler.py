"""Logits -> tokens. A token is a pure function of its row of logits and its `SampleRow`; no generator state anywhere.

Raw log-probabilities first, then bias, penalties and bans, then greedy rows take the maximum and the others add Gumbel
noise to what temperature, min_p, top_k and top_p left. All ties go to the lowest token id. Each row is computed by
operations that never mix rows, and sums whose order could matter are sums of integers.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from pdserve.base.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.logits import edit_logits, needs_edit, rank_keys
from pdserve.engine.philox import GumbelNoise
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow

#: Rows that are drawn at once: bounds the double-precision scratch memory, and keeps it near the cache.
_ROWS_AT_ONCE = 16
#: Most likely tokens that are looked at before the whole vocabulary is sorted for top_p.
_HEAD = 1024
#: Probabilities are weighed in units of 2**-32 of the most likely token's.
_WEIGHT_UNITS = 2.0**32


class Sampler:
    """Stateless; one instance per worker."""

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """One result per row, in order.

        `logits`: float32 [num_logits, vocab], not modified; row i is drawn from `logits[logits_rows[i]]`.
        """
        if list(logits_rows) != list(range(len(logits))):
            logits = logits[torch.tensor(logits_rows, device=logits.device)]
        best, token_ids = logits.max(dim=1)  # NaN counts as the largest; the first of equals is returned
        adjusted = [index for index, row in enumerate(rows) if needs_edit(row) or row.params.temperature > 0]
        if adjusted:
            where = torch.tensor(adjusted, device=logits.device)
            edited_best, chosen = _choose_adjusted(logits[where], [rows[index] for index in adjusted])
            token_ids = token_ids.index_copy(0, where, chosen)
            best = best.index_copy(0, where, torch.where(best[where].isfinite(), edited_best, best[where]))
        finite = best.isfinite()
        token_ids = torch.where(finite, token_ids, 0)
        reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        logprobs = _logprobs(logits, token_ids, rows, reported) if reported else {}
        return [
            Sampled(token_id=token_id, logprobs=logprobs.get(index))
            if is_finite
            else SampleFailure(reason=f"the logits of token {rows[index].position} have no finite maximum")
            for index, (token_id, is_finite) in enumerate(zip(token_ids.tolist(), finite.tolist(), strict=True))
        ]


def _choose_adjusted(logits: Tensor, rows: Items[SampleRow]) -> tuple[Tensor, Tensor]:
    """(largest logit, chosen id) of each row whose choice is more than an argmax; `logits` is scratch to edit."""
    for index, row in enumerate(rows):
        if needs_edit(row):
            edit_logits(logits[index], row)
    best, token_ids = logits.max(dim=1)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    for start in range(0, len(drawn), _ROWS_AT_ONCE):
        group = drawn[start : start + _ROWS_AT_ONCE]
        where = torch.tensor(group, device=logits.device)
        token_ids[where] = _draw(logits[where], [rows[index] for index in group])
    return best, token_ids


def _draw(logits: Tensor, rows: Items[SampleRow]) -> Tensor:
    """Token ids, int64 [num_rows]: the largest of (logit / temperature + noise) among the tokens left by truncation."""
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for truncated in (False, True):
        group = [index for index, row in enumerate(rows) if _truncates(row.params) is truncated]
        if not group:
            continue
        where = torch.tensor(group, device=logits.device)
        params = [rows[index].params for index in group]
        noise = GumbelNoise(
            [(rows[index].params.seed, rows[index].choice_index, rows[index].position) for index in group],
            logits.device,
        )
        scaled = _scale(logits[where], params)
        if truncated:
            candidates, scores = _truncate(logits[where], scaled, params)
            token_ids[where] = _lowest_best(candidates, scores + noise.of_tokens(candidates))
        else:
            token_ids[where] = (scaled + noise.of_vocabulary(logits.shape[1])).max(dim=1).indices
    return token_ids


def _scale(logits: Tensor, params: Items[SamplingParams]) -> Tensor:
    """(logit - largest logit) / temperature, float64 [num_rows, vocab], 0 for the most likely token."""
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
    wide = logits.to(torch.float64)
    return (wide - wide.amax(dim=1, keepdim=True)).div_(temperature.unsqueeze(1))


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _truncate(logits: Tensor, scaled: Tensor, params: Items[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Candidates of each row in descending order: (ids int64, scaled logits float64, -inf where dropped) [rows, n].

    top_k and min_p first; then top_p keeps the smallest head that holds `top_p` of the probability that they left.
    """
    device = logits.device
    vocab_size = logits.shape[1]
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    only_top_p = (top_k >= vocab_size) & (min_p <= 0.0)
    keys = rank_keys(logits)
    for size in dict.fromkeys((min(_HEAD, vocab_size), vocab_size)):
        ids = keys.topk(size, dim=1).indices if size < vocab_size else keys.argsort(dim=1, descending=True)
        head = scaled.gather(1, ids)
        kept = (torch.arange(size, device=device) < top_k) & (head.exp() >= min_p)
        weights = _weights(head) * kept
        # Candidates may go on behind the head. Then their total is known only if nothing but top_p limits them.
        is_open = kept[:, -1:] & (size < vocab_size)
        total = weights.sum(dim=1, keepdim=True)
        if bool((is_open & only_top_p).any()):
            total = torch.where(is_open, _weights(scaled).sum(dim=1, keepdim=True), total)
        nucleus = (weights.cumsum(dim=1) - weights).to(torch.float64) < total * top_p
        kept &= nucleus | (top_p >= 1.0)
        kept[:, 0] = True
        if not bool((is_open & (~only_top_p | kept[:, -1:])).any()):
            break
    return ids, head.masked_fill_(~kept, -torch.inf)


def _weights(scaled: Tensor) -> Tensor:
    """Probabilities up to a factor, as integers: their sums are exact in any order."""
    return (scaled.exp() * _WEIGHT_UNITS).to(torch.int64)


def _lowest_best(ids: Tensor, scores: Tensor) -> Tensor:
    """The id with the largest score in each row, the lowest one of equals."""
    tied = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(tied, ids, torch.iinfo(torch.int64).max).amin(dim=1)


def _logprobs(
    logits: Tensor, token_ids: Tensor, rows: Items[SampleRow], reported: Items[int]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the chosen tokens of the `reported` rows, by row; from the logits as the model gave them."""
    where = torch.tensor(reported, device=logits.device)
    raw = logits[where]
    logprobs = raw.log_softmax(dim=1)
    keys = rank_keys(raw)
    chosen = token_ids[where].unsqueeze(1)
    ranks = (keys > keys.gather(1, chosen)).sum(dim=1) + 1
    wanted = [rows[index].params.logprobs or 0 for index in reported]
    top = keys.topk(min(max(wanted), raw.shape[1]), dim=1).indices
    return {
        index: TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_ids=tuple(top_ids[:count]),
            top_logprobs=tuple(top_logprobs[:count]),
        )
        for index, count, logprob, rank, top_ids, top_logprobs in zip(
            reported,
            wanted,
            logprobs.gather(1, chosen).squeeze(1).tolist(),
            ranks.tolist(),
            top.tolist(),
            logprobs.gather(1, top).tolist(),
            strict=True,
        )
    }
