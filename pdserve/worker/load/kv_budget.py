"""The number of KV blocks a worker gets, and the longest sequence that fits into them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.observe.machine import available_memory_bytes

log = get_logger(__name__)

_GIB = 1024**3

#: The default size: a fifth of the machine's free memory after the weights, but at most 2 GiB.
DEFAULT_SHARE = 0.2
DEFAULT_CEILING_BYTES = 2 * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRequest:
    """The user's settings of the KV cache, and the model's limit."""

    #: Bytes on all ranks together (--kv-cache-memory); None: not set.
    memory_bytes: int | None = None
    #: Tokens of the longest sequence (--max-model-len); None: not set.
    max_model_len: int | None = None
    #: Tokens of the longest sequence that the model supports.
    model_limit: int
    #: Tokens of the longest sequence without a setting; None: `model_limit`.
    model_default: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """Size of the KV cache, and the longest sequence that a worker accepts."""

    num_blocks: int
    max_model_len: int


def plan_kv(layout: KvLayout, request: KvRequest, *, weight_bytes: int) -> KvBudget:
    """Sizes the KV cache in the machine's memory, of which the weights will take `weight_bytes`.

    When the user set no length and the cache is too small for the model's limit, the cache limits the length. Raises
    `SetupError` with the numbers.
    """
    available = available_memory_bytes()
    left = max(0, available - weight_bytes)
    size = min(DEFAULT_CEILING_BYTES, int(left * DEFAULT_SHARE))
    if request.memory_bytes is not None:
        size = request.memory_bytes
    if max(size, layout.block_bytes) > left:
        raise SetupError(
            f"The KV cache of {show_bytes(size)} does not fit: {show_bytes(available)} of memory is free, and the "
            f"weights take {show_bytes(weight_bytes)} of it. Lower --kv-cache-memory or free memory on this machine."
        )
    return kv_budget(layout, request, size=size)


def kv_budget(layout: KvLayout, request: KvRequest, *, size: int) -> KvBudget:
    """The capacity of a KV cache of `size` bytes. Raises `SetupError` with the numbers, as `plan_kv` does."""
    num_blocks, num_groups = size // layout.block_bytes, len(layout.groups)
    if num_blocks < num_groups:
        raise SetupError(
            f"The KV cache of {show_bytes(size)} cannot hold one block of {layout.block_size} tokens "
            f"({show_bytes(num_groups * layout.block_bytes)}). Raise --kv-cache-memory or lower --block-size."
        )
    requested, limit = request.max_model_len, request.model_limit
    if requested is not None and requested > limit:
        raise SetupError(
            f"--max-model-len {requested} exceeds the model's own limit of {limit} tokens. Lower it, or leave it out."
        )
    capacity = num_blocks // num_groups * layout.block_size
    if requested is not None and requested > capacity:
        needed = -(-requested // layout.block_size) * num_groups * layout.block_bytes
        raise SetupError(
            f"--max-model-len {requested} needs a KV cache of {show_bytes(needed)}, but this one has "
            f"{show_bytes(size)}, which holds {capacity} tokens. Raise --kv-cache-memory or lower --max-model-len."
        )
    wanted = requested or request.model_default or limit
    if capacity < wanted:
        log.warning("max_model_len_lowered", wanted=wanted, capacity=capacity, kv_cache_bytes=size)
    return KvBudget(num_blocks=num_blocks, max_model_len=min(wanted, capacity))


def show_bytes(size: int) -> str:
    """The size in GiB if it is at least one, else in MiB."""
    return f"{size / _GIB:.2f} GiB" if abs(size) >= _GIB else f"{size / 1024**2:.2f} MiB"
