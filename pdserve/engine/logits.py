"""What happens to a row of logits before a token is chosen (bias, penalties, bans), and their order without ties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.sequence import SampleRow


def needs_edit(row: SampleRow) -> bool:
    """Whether anything but temperature and truncation changes the row's logits."""
    return bool(row.banned or row.params.logit_bias) or _penalizes(row)


def edit_logits(logits: Tensor, row: SampleRow) -> None:
    """Apply bias, penalties and bans to one row, float32 [vocab], in place.

    Repetition looks at prompt and output, presence and frequency at the output only.
    """
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if _penalizes(row):
        # A copy: a view would keep the sequence's array from growing.
        tokens = torch.from_numpy(np.array(row.tokens, dtype=np.int64)).to(logits.device)
        if params.repetition_penalty != 1.0:
            seen = logits[tokens]
            # A token that occurs twice is written twice with the same value.
            logits[tokens] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        output = tokens[row.num_prompt :]
        counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if row.banned:
        logits[torch.tensor(row.banned, device=logits.device)] = -torch.inf


def rank_keys(values: Tensor) -> Tensor:
    """int64 keys [..., n], all different, that sort like float32 `values` with ties resolved to the lowest index."""
    # + 0.0 turns -0.0, whose bits sort lower, into its equal 0.0. Otherwise bits sort like sign and magnitude.
    bits = (values + 0.0).view(torch.int32)
    ordered = bits.bitwise_xor((bits >> 31).bitwise_and_(0x7FFFFFFF)).to(torch.int64)
    lowest_first = 0x7FFFFFFF - torch.arange(values.shape[-1], device=values.device)
    return (ordered << 32).bitwise_or_(lowest_first)


def _penalizes(row: SampleRow) -> bool:
    params = row.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
