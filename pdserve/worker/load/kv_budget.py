"""How many KV blocks a worker gets, and how long a sequence may become in them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.machine import available_memory_bytes

log = get_logger(__name__)

_GIB = 1024**3

#: Taken when nothing is said: a fifth of what weights leave of the machine's free memory, 2 GiB at most.
DEFAULT_SHARE = 0.2
DEFAULT_CEILING_BYTES = 2 * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """The KV cache's size and the longest sequence a worker takes."""

    num_blocks: int
    max_model_len: int


def plan_kv(
    layout: KvLayout,
    *,
    weight_bytes: int,
    kv_cache_memory: int | None,
    wanted_model_len: int | None,
    model_limit: int,
) -> KvBudget:
    """Sizes the KV cache in the machine's memory, of which weights are still to take `weight_bytes`.

    `wanted_model_len` is the user's limit, `model_limit` the model's own; both in tokens. When the user asked for none
    and the cache is too small for the model's limit, the cache decides. Raises `SetupError` with the numbers.
    """
    available = available_memory_bytes()
    left = max(0, available - weight_bytes)
    budget = min(DEFAULT_CEILING_BYTES, int(left * DEFAULT_SHARE)) if kv_cache_memory is None else kv_cache_memory
    if max(budget, layout.block_bytes) > left:
        raise SetupError(
            f"The KV cache of {show_bytes(budget)} does not fit: {show_bytes(available)} of memory is free, and the "
            f"weights take {show_bytes(weight_bytes)} of it. Lower --kv-cache-memory, or end what else takes memory."
        )
    return kv_budget(layout, budget, wanted_model_len=wanted_model_len, model_limit=model_limit)


def kv_budget(layout: KvLayout, budget: int, *, wanted_model_len: int | None, model_limit: int) -> KvBudget:
    """What a KV cache of `budget` bytes holds. Raises `SetupError` with the numbers, as `plan_kv`."""
    num_blocks = budget // layout.block_bytes
    if num_blocks < 1:
        raise SetupError(
            f"The KV cache of {show_bytes(budget)} cannot hold one block of {layout.block_size} tokens "
            f"({show_bytes(layout.block_bytes)}). Raise --kv-cache-memory or lower --block-size."
        )
    if wanted_model_len is not None and wanted_model_len > model_limit:
        raise SetupError(f"--max-model-len {wanted_model_len} exceeds the model's own limit of {model_limit} tokens.")
    capacity = num_blocks * layout.block_size
    if wanted_model_len is not None and wanted_model_len > capacity:
        needed = -(-wanted_model_len // layout.block_size) * layout.block_bytes
        raise SetupError(
            f"--max-model-len {wanted_model_len} needs a KV cache of {show_bytes(needed)}, but it has "
            f"{show_bytes(budget)}, which is {capacity} tokens. Raise --kv-cache-memory or lower --max-model-len."
        )
    limit = wanted_model_len or model_limit
    if capacity < limit:
        log.warning("max_model_len_lowered", wanted=limit, capacity=capacity, kv_cache_bytes=budget)
    return KvBudget(num_blocks=num_blocks, max_model_len=min(limit, capacity))


def show_bytes(size: int) -> str:
    """In MiB, or GiB from one on."""
    return f"{size / _GIB:.2f} GiB" if abs(size) >= _GIB else f"{size / 1024**2:.2f} MiB"
