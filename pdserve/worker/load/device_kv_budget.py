"""How much of a GPU's memory becomes KV cache: what is left of this worker's share once all else was measured."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.worker.load.kv_budget import KvBudget, kv_budget, show_bytes

#: Of the worker's share, kept free: for graphs themselves, what libraries take when they are first used, fragmentation.
_MARGIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """A GPU's memory as this worker found it, and what it has needed of it since, in bytes."""

    total: int
    #: When the worker started.
    free: int
    #: As loaded.
    weights: int
    #: At most, in a step of as many tokens as a step may have, beside weights and KV.
    activations: int
    #: That CUDA graphs compute in, which nothing else uses.
    graphs: int = 0
    #: For what ranks say to each other.
    group: int = 0

    def __str__(self) -> str:
        graphs = f", CUDA graphs {show_bytes(self.graphs)}" if self.graphs else ""
        group = f", exchange between ranks {show_bytes(self.group)}" if self.group else ""
        step = show_bytes(self.activations)
        return f"weights {show_bytes(self.weights)}, activations of the largest step {step}{graphs}{group}"


def plan_device_kv(
    layout: KvLayout,
    use: DeviceUse,
    *,
    utilization: float,
    kv_cache_memory: int | None,
    num_ranks: int = 1,
    wanted_model_len: int | None,
    model_limit: int,
    staging: int = 0,
) -> KvBudget:
    """Sizes the KV cache on a GPU of which this worker may take the share `utilization`, 0 to 1.

    `kv_cache_memory`: what the user wants on all of `num_ranks` GPUs together; None: all that is left. `staging`: bytes
    of the stage, if it is there, too. Raises `SetupError` with the numbers, which say what would fit.
    """
    share = int(use.total * utilization)
    if share > use.free:
        raise SetupError(
            f"--gpu-memory-utilization {utilization:g} is {show_bytes(share)} of the GPU's {show_bytes(use.total)}, "
            f"but only {show_bytes(use.free)} were free: other processes have the rest. Stop them, or give this worker "
            f"at most {int(100 * use.free / use.total) / 100:g}."
        )
    left = share - use.weights - use.activations - use.graphs - use.group - int(share * _MARGIN) - staging
    taken = f"{use}, staging memory {show_bytes(staging)}" if staging else str(use)
    if left < layout.block_bytes:
        raise SetupError(
            f"The model does not fit into {show_bytes(share)} of GPU memory (--gpu-memory-utilization {utilization:g} "
            f"of {show_bytes(use.total)}): {taken}, one KV block {show_bytes(layout.block_bytes)}. Raise the share, "
            "lower --max-num-batched-tokens, or use a larger GPU."
        )
    wanted = left if kv_cache_memory is None else kv_cache_memory // num_ranks
    if kv_cache_memory is not None and wanted > left:
        part = "" if num_ranks == 1 else f", a rank's part of which is {show_bytes(wanted)},"
        tokens = left // layout.block_bytes * layout.block_size
        raise SetupError(
            f"--kv-cache-memory {show_bytes(kv_cache_memory)}{part} does not fit into {show_bytes(share)} of GPU "
            f"memory beside {taken}: {show_bytes(left)} are left, which is {tokens} tokens."
        )
    return kv_budget(layout, wanted, wanted_model_len=wanted_model_len, model_limit=model_limit)
