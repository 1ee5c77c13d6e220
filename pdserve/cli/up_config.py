"""Settings of `pdserve up`. Names and meanings follow `vllm serve` where they are the same."""

from __future__ import annotations

from dataclasses import dataclass

from decode_svc.config import DecodeConfig
from pdserve.base.config import default_of, option, parse_bytes
from pdserve.base.logs import LEVELS
from pdserve.worker.config import (
    DTYPES,
    HANDOVER_MEMORIES,
    KERNELS,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    TRANSPORTS,
    WorkerConfig,
)
from prefill_svc.config import PrefillConfig
from router_svc.config import LOCAL_PREFILL, RouterConfig

#: Small, free, and had without a model hub.
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """What `pdserve up` needs to know."""

    model: str = option(
        DEFAULT_MODEL, help="name, directory, .gguf file or hub id of the model", metavar="MODEL", positional=True
    )
    host: str = option("127.0.0.1", help="address the router listens on; 0.0.0.0 for all", metavar="ADDRESS")
    port: int = option(8000, help="port of the OpenAI-compatible HTTP API", minimum=1)
    grpc_port: int | None = option(None, help="port of the gRPC API; --port + 1 when absent", minimum=1)
    prefill: int = option(
        1, help="number of prefill workers; 0 lets the decode workers do everything", metavar="N", minimum=0
    )
    decode: int = option(1, help="number of decode workers", metavar="N", minimum=1)
    served_model_name: str | None = option(None, help="name clients use; the model's own when absent")
    device: str = option("cpu", help="where models compute: cpu, cuda (workers take turns on the GPUs), or cuda:1")
    tensor_parallel_size: int = option(
        default_of(WorkerConfig, "tensor_parallel_size"),
        help="ranks of each worker that share the model: as many GPUs, or on the CPU processes",
        minimum=1,
    )
    prefill_tensor_parallel_size: int | None = option(None, help="the same, of prefill workers only", minimum=1)
    decode_tensor_parallel_size: int | None = option(None, help="the same, of decode workers only", minimum=1)
    gpu_memory_utilization: float = option(
        default_of(WorkerConfig, "gpu_memory_utilization"),
        help="share of each GPU's memory, for all workers on it together",
        minimum=0.01,
    )
    deterministic: bool = option(
        default_of(WorkerConfig, "deterministic"),
        help="on GPUs: the same bits for a request whatever is computed beside it, at some cost in speed",
    )
    enforce_eager: bool = option(
        default_of(WorkerConfig, "enforce_eager"),
        help="on GPUs: launch every kernel of a decode step instead of CUDA graphs",
    )
    dtype: str = option("auto", help="type of weights, activations and KV", choices=DTYPES)
    kv_cache_dtype: str = option(
        default_of(WorkerConfig, "kv_cache_dtype"),
        help="type of KV: that of --dtype, or 8-bit floats (not with C++ kernels)",
        choices=KV_CACHE_DTYPES,
    )
    kernels: str = option(
        "auto",
        help="what computes: C++ (cpu), Triton (triton), plain torch (reference), or what is best on the device",
        choices=KERNELS,
    )
    quantization: str | None = option(None, help="round weights when they are loaded", choices=QUANTIZATIONS)
    max_model_len: int | None = option(
        None, help="longest prompt plus completion in tokens; the model's own limit when absent", minimum=1
    )
    max_num_seqs: int = option(
        default_of(DecodeConfig, "max_num_seqs"), help="sequences a decode worker runs at the same time", minimum=1
    )
    max_num_batched_tokens: int = option(
        default_of(PrefillConfig, "max_num_batched_tokens"),
        help="prompt tokens a worker computes in one step: the chunk size of prefill",
        minimum=1,
    )
    block_size: int = option(default_of(WorkerConfig, "block_size"), help="tokens of a KV block", minimum=1)
    kv_cache_memory: int | None = option(
        None,
        help="size of each worker's KV cache, such as 2GiB; when absent, a fifth of the free memory divided by the "
        "number of workers, 2GiB at most, or what is left of a GPU",
        parse=parse_bytes,
    )
    threads_per_worker: int | None = option(
        None, help="compute threads of each worker; the cores divided among the workers when absent", minimum=1
    )
    lend_cores: bool = option(
        True, help="workers with nothing to do lend their cores to the others, which keep at least their own"
    )
    local_prefill_threshold: int = option(
        default_of(RouterConfig, "local_prefill_threshold"),
        help="prompts with at most this many uncached tokens are prefilled by the decode worker",
        minimum=0,
    )
    local_prefill: str = option(
        default_of(RouterConfig, "local_prefill"),
        help="when decode workers prefill what is longer: where that is clearly sooner (auto), or never (threshold)",
        choices=LOCAL_PREFILL,
    )
    transport: str = option(
        default_of(WorkerConfig, "transport"), help="how KV blocks travel between workers", choices=TRANSPORTS
    )
    layer_groups: int | None = option(
        None,
        help="messages in which a KV block travels, each some of its layers, sent while later ones are computed; when "
        "absent 4 on GPUs and 1 on CPUs",
        minimum=1,
    )
    staging_memory: int = option(
        default_of(WorkerConfig, "staging_memory"),
        help="on GPUs: host memory of each worker in which blocks stop over on their way, such as 1GiB",
        parse=parse_bytes,
    )
    handover_memory: str = option(
        default_of(WorkerConfig, "handover_memory"),
        help="on GPUs: where blocks stop over on their way, host memory or the GPU's",
        choices=HANDOVER_MEMORIES,
    )
    redis_url: str | None = option(None, help="Redis to use; a private one is started when absent", metavar="URL")
    cache_dir: str | None = option(
        None, help="where downloaded and converted models are kept; the user's cache directory when absent"
    )
    log_dir: str | None = option(
        None, help="one log file per process goes here; a new directory of the user's state directory when absent"
    )
    ready_timeout_s: float = option(600.0, help="seconds each process gets to become ready", minimum=1)
    drain_timeout_s: float = option(45.0, help="seconds running requests get to finish on Ctrl-C", minimum=0)
    log_level: str = option("info", help="what is logged", choices=LEVELS)

    @property
    def num_workers(self) -> int:
        """Workers of both tiers."""
        return self.prefill + self.decode

    @property
    def num_ranks(self) -> dict[str, int]:
        """Of a worker of each tier."""
        return {
            "prefill": self.prefill_tensor_parallel_size or self.tensor_parallel_size,
            "decode": self.decode_tensor_parallel_size or self.tensor_parallel_size,
        }

    @property
    def effective_grpc_port(self) -> int:
        """The port of the gRPC API."""
        return self.port + 1 if self.grpc_port is None else self.grpc_port
