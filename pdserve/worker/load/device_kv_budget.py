"""The share of a GPU's memory that becomes KV cache: this worker's share, less everything that was measured."""

from __future__ import annotations

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.worker.load.kv_budget import KvBudget, KvRequest, kv_budget, show_bytes
from pdserve.worker.load.memory_profile import MemoryProfile

#: Fraction of the worker's share that stays free, for CUDA graphs themselves, lazy allocations of libraries, and
#: fragmentation.
_MARGIN = 0.02


def plan_device_kv(
    layout: KvLayout,
    profile: MemoryProfile,
    request: KvRequest,
    *,
    utilization: float,
    num_ranks: int = 1,
    staging_bytes: int = 0,
) -> KvBudget:
    """Sizes the KV cache on a GPU of whose memory this worker may use the share `utilization`, 0 to 1.

    `request` is for all `num_ranks` GPUs together, the result for one of them. `staging_bytes`: size of the stage if it
    is on the GPU, too. Raises `SetupError` with the numbers, including what would fit.
    """
    share = _share(profile, utilization)
    left = share - profile.used - int(share * _MARGIN) - staging_bytes
    taken = f"{profile}, staging memory {show_bytes(staging_bytes)}" if staging_bytes else str(profile)
    if left < layout.block_bytes:
        raise SetupError(
            f"The model does not fit into {show_bytes(share)} of GPU memory (--gpu-memory-utilization {utilization:g} "
            f"of {show_bytes(profile.total)}): {taken}, one KV block {show_bytes(layout.block_bytes)}. Raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens, or use a larger GPU."
        )
    if request.memory_bytes is None:
        return kv_budget(layout, request, size=left)
    size = request.memory_bytes // num_ranks
    if size > left:
        shard = "" if num_ranks == 1 else f", {show_bytes(size)} for each of {num_ranks} ranks,"
        tokens = left // layout.block_bytes * layout.block_size
        raise SetupError(
            f"--kv-cache-memory {show_bytes(request.memory_bytes)}{shard} does not fit into {show_bytes(share)} of "
            f"GPU memory: {taken}. {show_bytes(left)} are left, which hold {tokens} tokens. Lower --kv-cache-memory, "
            "or leave it out to use what is left."
        )
    return kv_budget(layout, request, size=size)


def _share(profile: MemoryProfile, utilization: float) -> int:
    share = int(profile.total * utilization)
    if share > profile.free:
        raise SetupError(
            f"--gpu-memory-utilization {utilization:g} is {show_bytes(share)} of the GPU's "
            f"{show_bytes(profile.total)}, but only {show_bytes(profile.free)} were free: other processes use the "
            "rest, or, being stopped, still map the cache of a worker that was killed. End them, or set it to at most "
            f"{int(100 * profile.free / profile.total) / 100:g}."
        )
    return share
