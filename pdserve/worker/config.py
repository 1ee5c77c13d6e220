"""Settings that prefill and decode workers share. Names follow `vllm serve` where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdserve.base.addresses import parse_host, parse_worker_id
from pdserve.base.config import option
from pdserve.base.option_values import parse_bytes, parse_ints
from pdserve.base.shared_options import ServiceOptions
from pdserve.redis.redis_keys import DEFAULT_PREFIX, parse_prefix

DTYPES = ("auto", "float32", "bfloat16", "float16")
FP8_KV = "fp8_e4m3"
KV_CACHE_DTYPES = ("auto", FP8_KV)
#: Default number of layer groups on a GPU. The last message has a quarter of the layers, and copies stay few.
GPU_LAYER_GROUPS = 4
HANDOVER_MEMORIES = ("host", "device")
TRANSPORT_GUARDS = ("auto", "require", "off")
TRANSPORTS = ("ucx", "nccl")
KERNELS = ("auto", "cpu", "triton", "reference")
QUANTIZATIONS = ("int8",)


class StepLimits(NamedTuple):
    """What one step computes at most, where no flag says it."""

    prompt_tokens: int
    sequences: int


#: 512 tokens of the default model take two cores (Zen 4) about a third of a second.
CPU_STEP = StepLimits(prompt_tokens=512, sequences=64)
#: 4,096 tokens of a model of 8 billion parameters take an H200 about a tenth of a second in fast mode. Beside running
#: sequences the ITL budget allows fewer.
GPU_STEP = StepLimits(prompt_tokens=4096, sequences=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceOptions):
    """Settings of a worker of either tier."""

    model: str = option(help="directory of the model, as `pdserve up` prepared it", metavar="DIR")
    redis_url: str = option(help="Redis with the worker registry and the prefix index", metavar="URL")
    redis_prefix: str = option(
        DEFAULT_PREFIX, help="what the names of all keys in Redis begin with", metavar="PREFIX", parse=parse_prefix
    )
    served_model_name: str | None = option(None, help="name clients use; default: the directory's name")
    worker_id: str | None = option(
        None,
        help="name of this worker, stable across restarts; auto: the host's; default: random",
        parse=parse_worker_id,
    )
    host: str = option(
        "127.0.0.1",
        help="internal address to listen on, and at which others reach this worker; auto: that of the host's name",
        metavar="ADDRESS",
        parse=parse_host,
    )
    grpc_port: int = option(0, help="port of the internal gRPC service; 0: any free port", minimum=0)
    http_port: int = option(0, help="port of /livez, /readyz, /health and /metrics; 0: any free port", minimum=0)
    device: str = option("cpu", help="device to compute on: cpu, cuda, or cuda:1 for one of several GPUs")
    tensor_parallel_size: int = option(
        1,
        help="ranks that split the model's heads and weights: GPUs from --device on, or processes on the CPU",
        minimum=1,
    )
    gpu_memory_utilization: float = option(
        0.9, help="share of the GPU's memory for this worker: weights, activations and KV", minimum=0.01
    )
    deterministic: bool = option(
        True, help="on a GPU: the same bits for a request whatever else is in its batch, at some cost in speed"
    )
    enforce_eager: bool = option(
        False, help="on a GPU: launch every kernel of a decode step instead of replaying CUDA graphs"
    )
    dtype: str = option("auto", help="data type of weights, activations and KV", choices=DTYPES)
    kv_cache_dtype: str = option(
        "auto",
        help="data type of KV: that of --dtype, or 8-bit floats (not with C++ kernels)",
        choices=KV_CACHE_DTYPES,
    )
    kernels: str = option(
        "auto",
        help="kernels: C++ (cpu), Triton (triton), plain torch (reference), or the best for the device",
        choices=KERNELS,
    )
    instruction_set: str | None = option(
        None, help="instruction set of the C++ kernels; default: the best of the processor", metavar="NAME"
    )
    quantization: str | None = option(None, help="round the weights when they are loaded", choices=QUANTIZATIONS)
    block_size: int = option(16, help="tokens per KV block", minimum=1)
    kv_cache_memory: int | None = option(
        None, help="size of the KV cache, such as 2GiB; default: from the free memory", parse=parse_bytes
    )
    max_model_len: int | None = option(
        None, help="longest prompt plus completion in tokens; default: the model's own limit", minimum=1
    )
    threads: int | None = option(
        None, help="compute threads; default: one for each of --cpus, else for each core of the CPU quota", minimum=1
    )
    cpus: tuple[int, ...] = option((), help="cores to pin the compute threads to, such as 0,2-3", parse=parse_ints)
    borrow_cpus: tuple[int, ...] = option(
        (), help="cores of other workers to compute on while those workers are idle", parse=parse_ints
    )
    core_leases: str | None = option(
        None, help="file in which the workers of a machine report idle cores; created if missing", metavar="FILE"
    )
    claim_dir: str | None = option(
        None,
        help="directory shared by the workers of a machine, in which this one claims cores, or with --device cuda a "
        "GPU, that no other live worker holds",
        metavar="DIR",
    )
    claim_workers: int = option(
        2, help="workers on this machine among which --claim-dir divides the cores evenly", minimum=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        help=f"maximum prompt tokens in one step; default: {CPU_STEP.prompt_tokens}, on a GPU {GPU_STEP.prompt_tokens}",
        minimum=1,
    )
    staging_memory: int = option(
        1 << 30,
        help="on GPUs and with several ranks: memory for blocks on their way to or from the network, such as 1GiB",
        parse=parse_bytes,
    )
    handover_memory: str = option(
        "host",
        help="on a GPU: memory that blocks pass through on their way, host memory or the GPU's",
        choices=HANDOVER_MEMORIES,
    )
    transport: str = option("ucx", help="transport of KV blocks", choices=TRANSPORTS)
    local_sockets: str = option(
        "auto",
        help="directory in which workers of one host find each other, to hand blocks over through shared memory; "
        "auto: this user's; off: they use --transport",
        metavar="DIR",
    )
    guard_transport: str = option(
        "auto",
        help="in a cluster with a secret or TLS between peers: keep strangers out of the ports of UCX",
        choices=TRANSPORT_GUARDS,
    )
    stall_timeout_s: float = option(
        300.0, help="seconds that a step may take, compiling apart, before /livez reports a hang", minimum=1
    )

    @property
    def trace_sample_ratio(self) -> float | None:
        """None: routers decide which requests are traced."""
        return None

    @property
    def uses_local_sockets(self) -> bool:
        """Whether blocks are handed over through shared memory within the host, unless something is in the way."""
        return self.tensor_parallel_size == 1 and self.transport == "ucx" and self.local_sockets != "off"

    @property
    def model_dir(self) -> Path:
        """The model's directory."""
        return Path(self.model)

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model_dir.name

    @property
    def default_step(self) -> StepLimits:
        """The limits of a step on this device, without flags."""
        return CPU_STEP if self.device.startswith("cpu") else GPU_STEP

    @property
    def max_prompt_tokens(self) -> int:
        """Largest number of prompt tokens that one step computes."""
        return self.max_num_batched_tokens or self.default_step.prompt_tokens

    @property
    def max_decoding(self) -> int:
        """Largest number of sequences that one step decodes."""
        return 0
