"""What a worker computes before its first request, so that no request pays for set-up."""

from __future__ import annotations

import torch

from pdserve.base.logs import get_logger
from pdserve.base.timing import timed
from pdserve.engine.runner import Runner
from pdserve.model.batch import Batch
from pdserve.worker.load.kept_activations import forget_activations
from pdserve.worker.load.populate import populate_head
from pdserve.worker.serve.loaded_model import LoadedModel

log = get_logger(__name__)

#: Rows of the warm-up step: enough to take the code paths of a prompt, which the C++ kernels do above 32 rows.
_WARM_UP_TOKENS = 48
#: From as many rows on, a GPU's kernels have different tiles for different numbers of rows.
_TILED_TOKENS = 128


def warm_up(loaded: LoadedModel, *, max_prompt_tokens: int) -> None:
    """Computes prompt chunks and one decode row, so that no request pays for page faults, compiling or lazy set-up.

    On a GPU these are chunks of each power of two up to `max_prompt_tokens`: a tile is chosen for at least a factor of
    two of rows, so that each is compiled. Before, records the graphs that are needed first. Runs on the step thread
    before anything else. It overwrites the first blocks, which are free then.
    """
    populate_head(loaded.kv_cache.memory)
    try:
        _record_graphs(loaded.runner)
        with timed(log, "warmed_up"):
            _try_out(loaded, max_prompt_tokens)
    except torch.OutOfMemoryError:
        forget_activations()
        raise


def _try_out(loaded: LoadedModel, max_prompt_tokens: int) -> None:
    block_size = loaded.layout.block_size
    capacity = min(loaded.pool.num_blocks * block_size, loaded.limits.max_model_len)
    lengths = warm_up_lengths(max_prompt_tokens) if loaded.decoder.device.type == "cuda" else []
    for num_tokens in (min(_WARM_UP_TOKENS, capacity), *(length for length in lengths if length <= capacity), 1):
        rows = torch.arange(num_tokens)
        batch = Batch(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=rows,
            slot_mapping=rows,
            query_starts=torch.tensor([0, num_tokens]),
            context_lens=torch.tensor([num_tokens]),
            block_tables=torch.arange(-(-num_tokens // block_size)).unsqueeze(0),
            logits_rows=torch.tensor([num_tokens - 1]),
        )
        loaded.runner.try_out(batch)


def warm_up_lengths(max_prompt_tokens: int) -> list[int]:
    """Lengths of chunks for which a GPU's kernels may have different tiles."""
    return [1 << exponent for exponent in range(_TILED_TOKENS.bit_length() - 1, max_prompt_tokens.bit_length())]


def _record_graphs(runner: Runner) -> None:
    if not runner.prepare(is_idle=False):
        return
    with timed(log, "graphs_recorded") as fields:
        num_graphs = 1
        while runner.prepare(is_idle=False):
            num_graphs += 1
        fields["count"] = num_graphs
