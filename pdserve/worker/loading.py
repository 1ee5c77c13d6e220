"""From a model directory to something that computes: decoder, KV cache and pool, sized and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.choice import KernelChoice, KernelOptions
from kernels.cpu.decoder import Borrowing
from pdserve.base.core_leases import CoreLeases
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.worker_config import FP8_KV, WorkerConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SequenceLimits
from pdserve.model.batch import Batch
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.kv_scales import read_kv_scales, scales_digest
from pdserve.model.loader import load_decoder, load_weights, make_decoder
from pdserve.worker.cores import open_core_leases, require_cpus
from pdserve.worker.device import CudaMemory, LargestSteps, measure_use, open_device
from pdserve.worker.device_memory import plan_device_kv
from pdserve.worker.memory import KvBudget, plan_kv

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler

log = get_logger(__name__)

#: Rows of the warm-up step: enough to take the paths that a prompt takes.
_WARM_UP_TOKENS = 32
#: Of which one step can compute the last token, as far as memory is set aside for it.
_MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the step loop computes with, and what it may be asked."""

    layout: KvLayout
    limits: SequenceLimits
    decoder: Decoder
    kernels: KernelChoice
    kv_cache: KvCache
    pool: BlockPool
    runner: Runner
    #: Where this worker says whether its cores are idle; None: they are not lent.
    core_leases: CoreLeases | None


def load_model(config: WorkerConfig) -> LoadedModel:
    """Reads the weights, allocates the KV cache. Blocks for some seconds. Raises `SetupError` with the numbers."""
    device = open_device(config.device)
    require_cpus(config)
    leases = open_core_leases(config) if device.type == "cpu" else None
    model = ModelConfig.from_dir(config.model_dir)
    options = KernelOptions(
        implementation=config.kernels,
        instruction_set=config.instruction_set,
        num_threads=config.threads,
        cpus=config.cpus,
        borrowing=_borrowing(config, leases),
        quantization=config.quantization,
        deterministic=config.deterministic,
        kv_scales=read_kv_scales(config.model_dir, model) if config.kv_cache_dtype == FP8_KV else None,
    )
    load = _load_on_cpu if device.type == "cpu" else _load_on_gpu
    decoder, layout, budget = load(config, model, options, device)
    kv_cache = KvCache(layout, budget.num_blocks, device)
    return LoadedModel(
        layout=layout,
        limits=SequenceLimits(
            max_model_len=budget.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
        ),
        decoder=decoder,
        kernels=decoder.kernels,
        kv_cache=kv_cache,
        pool=BlockPool(budget.num_blocks, layout.block_size),
        runner=_runner(_step_decoder(config, decoder, layout, device), kv_cache, _sampler(device)),
        core_leases=leases,
    )


def _load_on_cpu(
    config: WorkerConfig, model: ModelConfig, options: KernelOptions, device: torch.device
) -> tuple[Decoder, KvLayout, KvBudget]:
    budget = plan_kv(
        _layout(config, model, config.max_model_len, options),
        kv_cache_memory=config.kv_cache_memory,
        wanted_model_len=config.max_model_len,
        model_limit=model.max_position_embeddings,
    )
    decoder = load_decoder(
        config.model_dir, dtype=config.dtype, max_model_len=budget.max_model_len, kernels=options, device=str(device)
    )
    return decoder, _layout(config, model, budget.max_model_len, options), budget


def _load_on_gpu(
    config: WorkerConfig, model: ModelConfig, options: KernelOptions, device: torch.device
) -> tuple[Decoder, KvLayout, KvBudget]:
    memory = CudaMemory(device)
    free_before = memory.free()
    weights = load_weights(config.model_dir, model, dtype=config.dtype, device=str(device))
    longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    layout = _layout(config, model, longest, options)
    use = measure_use(
        make_decoder(model, weights, max_model_len=longest, kernels=options),
        _sampler(device),
        layout,
        memory,
        free_before=free_before,
        steps=LargestSteps(
            num_tokens=config.max_num_batched_tokens,
            num_prompts=min(config.max_num_batched_tokens, _MOST_PROMPTS),
            num_decoding=config.max_decoding,
        ),
    )
    budget = plan_device_kv(
        layout,
        use,
        utilization=config.gpu_memory_utilization,
        kv_cache_memory=config.kv_cache_memory,
        wanted_model_len=config.max_model_len,
        model_limit=model.max_position_embeddings,
    )
    log.info("gpu_memory", device=str(device), total=use.total, weights=use.weights, activations=use.activations)
    # Bound once more: what can be served may have become shorter.
    decoder = make_decoder(model, weights, max_model_len=budget.max_model_len, kernels=options)
    return decoder, _layout(config, model, budget.max_model_len, options), budget


def _layout(config: WorkerConfig, model: ModelConfig, max_model_len: int | None, options: KernelOptions) -> KvLayout:
    """Some models rotate by the length that is served: the layout names it."""
    # Rounded weights make another model: its blocks must not be mixed with those of the original. Nor must blocks of an
    # fp8 cache that was computed with other activations, or has other scales.
    parts, dtype = [fingerprint(config.model_dir), config.quantization], config.dtype
    if options.kv_scales is not None:
        computed = model.dtype if dtype == "auto" else dtype
        parts, dtype = [*parts, computed, f"kv-scales-{scales_digest(options.kv_scales)}"], FP8_KV
    return model.kv_layout(
        fingerprint="/".join(filter(None, parts)),
        dtype=dtype,
        block_size=config.block_size,
        max_model_len=max_model_len,
    )


def _step_decoder(
    config: WorkerConfig, decoder: Decoder, layout: KvLayout, device: torch.device
) -> Decoder | DeviceDecoder:
    if device.type == "cpu":
        return decoder
    # Plain torch asks the device on its way, which cannot be captured.
    captures = config.max_decoding and not config.enforce_eager and decoder.kernels.implementation == "triton"
    return DeviceDecoder(
        decoder,
        device,
        recorder=CudaRecorder() if captures else None,
        max_num_seqs=max(1, config.max_decoding),
        max_blocks=-(-decoder.max_model_len // layout.block_size),
        vocab_size=decoder.config.vocab_size,
    )


def _runner(decoder: Decoder | DeviceDecoder, kv_cache: KvCache, sampler: Sampler | DeviceSampler) -> Runner:
    if isinstance(decoder, Decoder) or isinstance(sampler, Sampler):
        return Runner(decoder, kv_cache, sampler)
    return DeviceRunner(decoder, kv_cache, sampler)


def _sampler(device: torch.device) -> Sampler | DeviceSampler:
    if device.type == "cpu":
        return Sampler()
    # Only where it is used: Triton takes a second to import.
    from pdserve.engine.device_sampler import DeviceSampler

    return DeviceSampler(device)


def _borrowing(config: WorkerConfig, leases: CoreLeases | None) -> Borrowing | None:
    if leases is None or not config.borrow_cpus:
        return None
    return Borrowing(leases=leases.memory, borrower=leases.borrower, cpus=config.borrow_cpus)


def warm_up(loaded: LoadedModel) -> None:
    """One prompt chunk and one decode row, so that no request pays for mapping the weights in, compiling, lazy set-up.

    Runs on the step thread before anything else; block 0 is free then, and what it holds does not matter.
    """
    for first, num_tokens in ((0, min(_WARM_UP_TOKENS, loaded.layout.block_size)), (0, 1)):
        rows = torch.arange(first, first + num_tokens)
        batch = Batch(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=rows,
            slot_mapping=rows,
            query_starts=torch.tensor([0, num_tokens]),
            context_lens=torch.tensor([num_tokens]),
            block_tables=torch.zeros((1, 1), dtype=torch.int64),
            logits_rows=torch.tensor([num_tokens - 1]),
        )
        loaded.runner.try_out(batch)
