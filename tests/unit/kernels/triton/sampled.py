"""Helpers for tests of sampling: the engine's rows as tensors, and the results of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.triton.sample_rows import SampleRows, TokenHistory
from pdserve.engine.logits import edited_logits
from pdserve.engine.philox import GumbelNoise, gumbel
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleResult, SampleRow
from tests.support.devices import DEVICE


def sample_rows(rows: Items[SampleRow], logits_rows: Items[int], capacity: int = 64) -> SampleRows:
    """The same rows as tensors on the device; each row with penalties has a history slot, in reverse order."""

    def tensor(values: Items[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    penalized = [index for index, row in enumerate(rows) if row.penalizes]
    ids = torch.full((len(penalized) + 1, capacity), 0, dtype=torch.int32)
    counts = torch.zeros_like(ids)
    lens = torch.zeros(len(penalized) + 1, dtype=torch.int32)
    slots = [-1] * len(rows)
    for slot, index in enumerate(reversed(penalized)):
        row = rows[index]
        slots[index] = slot
        listed = sorted(set(row.tokens), key=lambda token: token * 7919 % 1009)
        output = Counter(row.tokens[row.num_prompt :])
        ids[slot, : len(listed)] = torch.tensor(listed)
        counts[slot, : len(listed)] = torch.tensor([output[token] for token in listed])
        lens[slot] = len(listed)
    biases = [dict(row.params.logit_bias) for row in rows]
    params = [row.params for row in rows]
    listed_ids = [each.logprob_token_ids for each in params]
    width = max(map(len, listed_ids), default=0)
    allowed = [row.allowed() for row in rows]
    masked = np.array([bits is not None for bits in allowed], bool)
    words = [bits.view(np.int32) for bits in allowed if bits is not None]
    return SampleRows(
        logits_index=tensor(logits_rows),
        seed=tensor([each.seed for each in params]),
        choice_index=tensor([row.choice_index for row in rows]),
        position=tensor([row.position for row in rows]),
        temperature=tensor([each.temperature for each in params], torch.float64),
        top_k=tensor([each.top_k for each in params], torch.int32),
        top_p=tensor([each.top_p for each in params], torch.float64),
        min_p=tensor([each.min_p for each in params], torch.float64),
        repetition_penalty=tensor([each.repetition_penalty for each in params], torch.float32),
        presence_penalty=tensor([each.presence_penalty for each in params], torch.float64),
        frequency_penalty=tensor([each.frequency_penalty for each in params], torch.float64),
        num_logprobs=tensor([-1 if each.logprobs is None else each.logprobs for each in params], torch.int32),
        listed_ids=tensor([[*ids, *[-1] * (width - len(ids))] for ids in listed_ids]).view(len(rows), width),
        history_slot=tensor(slots),
        history=TokenHistory(ids=ids.to(DEVICE), counts=counts.to(DEVICE), lens=lens.to(DEVICE)),
        bias_starts=tensor(np.cumsum([0, *map(len, biases)]).tolist()),
        bias_ids=tensor([token for bias in biases for token in bias]),
        bias_values=tensor([value for bias in biases for value in bias.values()], torch.float32),
        banned_starts=tensor(np.cumsum([0, *(len(row.banned) for row in rows)]).tolist()),
        banned_ids=tensor([token for row in rows for token in row.banned]),
        allowed_slot=tensor(np.where(masked, np.cumsum(masked) - 1, -1).tolist()),
        allowed_words=torch.from_numpy(np.stack(words)).to(DEVICE) if words else torch.zeros(0, 0, dtype=torch.int32),
    )


def reference(logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int] | None = None) -> list[SampleResult]:
    """Results of the engine's sampler."""
    return Sampler().sample(logits, rows, range(len(rows)) if logits_rows is None else logits_rows)


def reference_tokens(logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int] | None = None) -> list[int]:
    """Its tokens, -1 for failures."""
    results = reference(logits, rows, logits_rows)
    return [result.token_id if isinstance(result, Sampled) else -1 for result in results]


def scores(logits: Tensor, row: SampleRow) -> npt.NDArray[np.float64]:
    """The reference's score of each token of one row, before truncation."""
    edited = edited_logits(logits.numpy(), row).astype(np.float64)
    noise = gumbel(GumbelNoise(row.params.seed, row.choice_index, row.position).words_of_vocabulary(len(edited)))
    scored: npt.NDArray[np.float64] = (edited - edited.max()) / row.params.temperature + noise
    return scored


def kept(logits: Tensor, row: SampleRow) -> npt.NDArray[np.bool_]:
    """The tokens that truncation keeps by its definition, with a full sort: bool [vocab]."""
    params = row.params
    edited = edited_logits(logits.numpy(), row)
    scaled = (edited.astype(np.float64) - float(edited.max())) / params.temperature
    order = np.argsort(-edited, kind="stable")
    left = order[: params.top_k if params.top_k > 0 else len(order)]
    left = left[np.exp(scaled[left]) >= min(params.min_p, 1.0)]
    weights = (np.exp(scaled[left]) * 2.0**32).astype(np.int64)
    if params.top_p < 1:
        before = weights.cumsum() - weights
        left = left[(before < float(weights.sum()) * params.top_p) | (np.arange(len(left)) == 0)]
    mask = np.zeros(len(edited), np.bool_)
    mask[left] = True
    return mask
