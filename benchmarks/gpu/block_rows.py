"""Moving KV blocks: packing them on the device, and handing them to another process."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch

from benchmarks.gpu.rows import Finding, NotMeasured
from benchmarks.gpu.setting import Setting
from kernels.bench.inputs import BLOCK_SIZE
from kernels.bench.work import Work

_KEY = bytes(range(16))


def packing(setting: Setting, *, unpacks: bool) -> Finding:
    """Whole blocks, as many as hold a prompt; counted are the bytes read and those written."""
    if importlib.util.find_spec("triton") is None:
        return NotMeasured(why="Triton is not installed")
    from kernels.triton import blocks

    num_blocks, layers = setting.sizes.prefill_tokens // BLOCK_SIZE, len(setting.shape.windows)
    cache = setting.kv_cache(num_blocks, layers)
    ids = torch.randperm(num_blocks, device=setting.device)
    packed = torch.empty(num_blocks, cache[0].nbytes, dtype=torch.uint8, device=setting.device)
    keys = blocks.digest_keys(_KEY, cache[0].nbytes, setting.device)
    everything = {"layers": (0, layers), "heads": (0, setting.shape.num_kv_heads)}
    pack = partial(blocks.pack, cache, ids, packed, keys, **everything)
    pack()
    call = partial(blocks.unpack, packed, cache, ids, keys, **everything) if unpacks else pack
    return setting.measure(call, Work(num_bytes=2.0 * packed.nbytes, flops=0.0), in_graph=False)


def handover() -> Finding:
    """Two processes on one GPU."""
    return NotMeasured(why="no transport moves blocks between two processes' GPU memory yet")
