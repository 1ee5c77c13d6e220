"""Rows of moving KV blocks: packing them on the device, and handing them over to another process."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Semaphore
from typing import Literal

import torch

from benchmarks.gpu.handover import DEVICE, HOST, LOCAL, PINNED, Case, Times, measure
from benchmarks.gpu.measure import captured
from benchmarks.gpu.rows import Finding, Measured, NotMeasured
from benchmarks.gpu.setting import Setting
from kernels.bench.inputs import BLOCK_SIZE
from kernels.bench.work import Work
from pdserve.base.errors import PdserveError
from pdserve.base.layout import KvLayout
from pdserve.worker.config import GPU_LAYER_GROUPS

_KEY = bytes(range(16))
#: Rounds of handovers beside decode steps, and steps alone, for each repetition of a call.
_ROUNDS_DURING = 8
_HOW = {
    LOCAL: "from cache to cache",
    PINNED: "through pinned host memory",
    DEVICE: "staged in device memory",
    HOST: "staged in host memory",
}


def moving(setting: Setting, how: Literal["pack", "unpack", "gather", "digest"]) -> Finding:
    """Moves the blocks of a prompt within the device; counts the bytes read plus the bytes written."""
    if importlib.util.find_spec("triton") is None:
        return NotMeasured(why="Triton is not installed")
    from kernels.triton import blocks

    num_blocks, layers = setting.sizes.prefill_tokens // BLOCK_SIZE, len(setting.shape.windows)
    cache = setting.kv_cache(num_blocks, layers)
    ids = torch.randperm(num_blocks, device=setting.device)
    packed = torch.empty(num_blocks, cache[0].nbytes, dtype=torch.uint8, device=setting.device)
    keys = blocks.digest_keys(_KEY, cache[0].nbytes, setting.device)
    everything = {"layers": (0, layers), "heads": (0, setting.shape.num_kv_heads)}
    pack, here = partial(blocks.pack, cache, ids, packed, keys, **everything), blocks.Blocks(cache, ids)
    pack()
    num_sums = blocks.num_sums(cache, num_blocks, (0, layers))
    sums = torch.empty(num_sums, dtype=torch.int64, device=setting.device)
    call: Callable[[], object]
    match how:
        case "pack":
            call = pack
        case "unpack":
            call = partial(blocks.unpack, packed, cache, ids, keys, **everything)
        case "gather":
            source = blocks.Slices(packed.view(-1), ids * (cache[0].nbytes // 8))
            call = partial(blocks.gather, source, here, keys, sums, layers=(0, layers))
        case "digest":
            call = partial(blocks.digest, here, keys, sums, layers=(0, layers))
    times = 1.0 if how == "digest" else 2.0
    return setting.measure(call, Work(num_bytes=times * packed.nbytes, flops=0.0), in_graph=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handovers:
    """Times of the fastest way, and a description of all."""

    times: Times
    layout: KvLayout
    num_blocks: int
    how: str


def handover(setting: Setting) -> Finding:
    """Hands the blocks of a prompt over between two processes on one device; counts their bytes once."""
    found = _handovers(setting)
    work = Work(num_bytes=float(found.num_blocks * found.layout.block_bytes), flops=0.0)
    return Measured(samples_ms=found.times.whole_ms, work=work, how=found.how)


def exposed(setting: Setting) -> Finding:
    """The same, if all layer groups but the last have been sent before."""
    found = _handovers(setting)
    groups = min(GPU_LAYER_GROUPS, found.layout.num_layers)
    work = Work(num_bytes=found.num_blocks * found.layout.block_bytes / groups, flops=0.0)
    return Measured(samples_ms=found.times.exposed_ms, work=work, how=f"one of {groups} groups; {found.how}")


def short_handover(setting: Setting, *, at_once: int = 1) -> Finding:
    """Hands over the blocks of prompts of an eighth of the length, from cache to cache; counts their bytes once."""
    found = _short(setting, at_once)
    num_bytes = float(found.num_blocks * at_once * found.layout.block_bytes)
    return Measured(samples_ms=found.times.whole_ms, work=Work(num_bytes=num_bytes, flops=0.0), how=found.how)


def short_exposed(setting: Setting) -> Finding:
    """The same of one, if all layer groups but the last have been sent before."""
    found = _short(setting, 1)
    groups = min(GPU_LAYER_GROUPS, found.layout.num_layers)
    work = Work(num_bytes=found.num_blocks * found.layout.block_bytes / groups, flops=0.0)
    return Measured(samples_ms=found.times.exposed_ms, work=work, how=f"one of {groups} groups; {found.how}")


def decode_during_handovers(setting: Setting, batch: int) -> Finding:
    """Times decode steps while this process hands over short prompts to another one, as many at once, and alone."""
    call, work = setting.step([(1, setting.sizes.step_context)] * batch)
    step = captured(call) if setting.has_graphs else call
    step()
    whole = _case(setting, LOCAL)
    rounds = _ROUNDS_DURING * setting.sizes.repeats
    case = replace(whole, num_blocks=max(1, whole.num_blocks // 8), at_once=batch, rounds=rounds)
    alone = [setting.clock.once_ms(step) for _ in range(rounds)]
    turns = Semaphore(0)
    during = list[float]()
    with ThreadPoolExecutor(1) as threads:
        measuring = threads.submit(measure, case, turns.release)
        measuring.add_done_callback(lambda _: turns.release(2))
        turns.acquire()
        while not (during and turns.acquire(blocking=False)):
            during.append(setting.clock.once_ms(step))
        measuring.result()
    how = f"{len(during)} steps, {batch} handovers at once {_HOW[LOCAL]}"
    return Measured(samples_ms=tuple(during), against_ms=tuple(alone), work=work, how=how)


def handover_nccl(setting: Setting) -> Finding:
    """Like `handover`, from the first GPU's memory to the second's."""
    if torch.cuda.device_count() < 2:
        return NotMeasured(why="fewer than two GPUs, and NCCL does not connect two processes on one")
    case = replace(_case(setting, DEVICE), device="cuda:0", transport="nccl", peer_device="cuda:1")
    work = Work(num_bytes=float(case.num_blocks * case.layout.block_bytes), flops=0.0)
    return Measured(samples_ms=measure(case).whole_ms, work=work, how="from cuda:0 to cuda:1")


def _case(setting: Setting, memory: str) -> Case:
    shape = setting.shape
    layout = KvLayout.uniform(
        model="bench",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_layers=len(shape.windows),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    return Case(
        layout=layout,
        num_blocks=setting.sizes.prefill_tokens // BLOCK_SIZE,
        rounds=setting.sizes.repeats,
        device=str(setting.device),
        memory=memory,
    )


@cache
def _short(setting: Setting, at_once: int) -> _Handovers:
    whole = _case(setting, LOCAL)
    case = replace(whole, num_blocks=max(1, whole.num_blocks // 8), at_once=at_once)
    how = f"{_HOW[LOCAL]}, {at_once} at once"
    return _Handovers(times=measure(case), layout=case.layout, num_blocks=case.num_blocks, how=how)


@cache
def _handovers(setting: Setting) -> _Handovers:
    """Measures all ways of `_HOW`, and takes the fastest."""
    times: dict[str, Times] = {}
    notes = []
    for memory in _HOW:
        case = _case(setting, memory)
        layout, num_blocks = case.layout, case.num_blocks
        try:
            times[memory] = measure(case)
        except (RuntimeError, PdserveError) as error:
            notes.append(f"{_HOW[memory]} failed: {error}")
        else:
            rate = num_blocks * layout.block_bytes / statistics.median(times[memory].whole_ms) / 1e6
            notes.append(f"{_HOW[memory]} {rate:.3g} GB/s")
    if not times:
        raise RuntimeError("; ".join(notes))
    best = min(times, key=lambda memory: statistics.median(times[memory].whole_ms))
    how = f"{_HOW[best]} ({', '.join(notes)})"
    return _Handovers(times=times[best], layout=layout, num_blocks=num_blocks, how=how)
