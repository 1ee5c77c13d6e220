"""Settings of `pdserve up`. Names and meanings follow `vllm serve` where they are the same."""

from __future__ import annotations

from dataclasses import dataclass

from decode_svc.config import DecodeConfig
from pdserve.base.config import default_of, option, repeated_option, words_option
from pdserve.base.logs import FORMATS, LEVELS
from pdserve.base.option_values import parse_bytes
from pdserve.base.shared_options import same_option
from pdserve.net.hosts import parse_names
from pdserve.redis.redis_keys import DEFAULT_PREFIX, parse_prefix
from pdserve.worker.config import (
    DTYPES,
    HANDOVER_MEMORIES,
    KERNELS,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    TRANSPORTS,
    WorkerConfig,
)
from router_svc.config import LOCAL_PREFILL, RouterConfig

#: Small, free, and available without a model hub.
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of `pdserve up`."""

    model: tuple[str, ...] = repeated_option(
        (DEFAULT_MODEL,),
        help="name, directory, .gguf file or hub id of the model; several for several models",
        metavar="MODEL",
        positional=True,
    )
    host: str = option("127.0.0.1", help="address the router listens on; 0.0.0.0 for all", metavar="ADDRESS")
    port: int = option(8000, help="port of the OpenAI-compatible HTTP API", minimum=1)
    grpc_port: int | None = option(None, help="port of the gRPC API; default: --port + 1", minimum=1)
    admin_port: int | None = option(
        None,
        help="port of its own for metrics, the cluster, traces and the console; default: --port",
        minimum=1,
    )
    api_key: tuple[str, ...] = words_option(
        (),
        help="keys that clients need; default: PDSERVE_API_KEY, which commands use, too",
        parse=parse_names,
        metavar="KEY",
    )
    api_keys_file: str | None = same_option(RouterConfig, "api_keys_file")
    ssl_certfile: str | None = same_option(RouterConfig, "ssl_certfile")
    ssl_keyfile: str | None = same_option(RouterConfig, "ssl_keyfile")
    ssl_ca_certs: str | None = same_option(RouterConfig, "ssl_ca_certs")
    ssl_cert_reqs: int = same_option(RouterConfig, "ssl_cert_reqs")
    allowed_hosts: tuple[str, ...] = same_option(RouterConfig, "allowed_hosts")
    allowed_origins: tuple[str, ...] = same_option(RouterConfig, "allowed_origins")
    prefill: int | None = option(
        None,
        help="number of prefill workers per model; with 0 the decode workers also prefill; default: 1, and 0 where all "
        "workers would share one GPU",
        metavar="N",
        minimum=0,
    )
    decode: int = option(1, help="number of decode workers per model", metavar="N", minimum=1)
    served_model_name: tuple[str, ...] = repeated_option(
        (), help="name of the model for clients; once for each MODEL, in their order; default: the model's own"
    )
    alias: tuple[str, ...] = same_option(RouterConfig, "alias")
    device: str = option("cpu", help="cpu, cuda (GPUs are assigned round-robin), or one GPU such as cuda:1")
    tensor_parallel_size: int = option(
        default_of(WorkerConfig, "tensor_parallel_size"),
        help="tensor-parallel ranks per worker: one GPU each, or one process each on the CPU",
        minimum=1,
    )
    prefill_tensor_parallel_size: int | None = option(None, help="tensor-parallel ranks per prefill worker", minimum=1)
    decode_tensor_parallel_size: int | None = option(None, help="tensor-parallel ranks per decode worker", minimum=1)
    gpu_memory_utilization: float = option(
        default_of(WorkerConfig, "gpu_memory_utilization"),
        help="fraction of each GPU's memory for all workers on it together",
        minimum=0.01,
    )
    deterministic: bool = option(
        default_of(WorkerConfig, "deterministic"),
        help="on GPUs: bit-identical results whatever else is in the batch, at some cost in speed",
    )
    enforce_eager: bool = option(
        default_of(WorkerConfig, "enforce_eager"),
        help="on GPUs: launch every kernel of a decode step instead of replaying CUDA graphs",
    )
    dtype: str = option("auto", help="data type of weights, activations and KV", choices=DTYPES)
    kv_cache_dtype: str = option(
        default_of(WorkerConfig, "kv_cache_dtype"),
        help="data type of KV: that of --dtype (auto), or 8-bit floats (not with C++ kernels)",
        choices=KV_CACHE_DTYPES,
    )
    kernels: str = option(
        "auto",
        help="implementation: C++ (cpu), Triton (triton), plain torch (reference), or the best for the device (auto)",
        choices=KERNELS,
    )
    quantization: str | None = option(None, help="quantize weights when they are loaded", choices=QUANTIZATIONS)
    max_model_len: int | None = option(
        None, help="maximum tokens of prompt plus completion; default: the model's limit", minimum=1
    )
    max_num_seqs: int | None = same_option(DecodeConfig, "max_num_seqs")
    max_num_batched_tokens: int | None = same_option(WorkerConfig, "max_num_batched_tokens")
    itl_budget_ms: float = same_option(DecodeConfig, "itl_budget_ms")
    block_size: int = option(default_of(WorkerConfig, "block_size"), help="tokens per KV block", minimum=1)
    kv_cache_memory: int | None = option(
        None,
        help="size of each worker's KV cache, such as 2GiB; default: a fifth of the free memory divided by the number "
        "of workers, at most 2GiB; on a GPU the memory that is left",
        parse=parse_bytes,
    )
    threads_per_worker: int | None = option(
        None, help="compute threads per worker; default: the cores divided among the workers", minimum=1
    )
    lend_cores: bool = option(True, help="idle workers lend their cores to the others")
    local_prefill_threshold: int = option(
        default_of(RouterConfig, "local_prefill_threshold"),
        help="maximum uncached tokens of a prompt that the decode worker always prefills",
        minimum=0,
    )
    local_prefill: str = option(
        default_of(RouterConfig, "local_prefill"),
        help="whether decode workers prefill longer prompts: where that is clearly faster (auto), or never (threshold)",
        choices=LOCAL_PREFILL,
    )
    transport: str = option(
        default_of(WorkerConfig, "transport"), help="transport of KV blocks between workers", choices=TRANSPORTS
    )
    layer_groups: int | None = option(
        None,
        help="number of messages per KV block, each with some of its layers and sent while later layers are computed; "
        "default: 4 on GPUs, 1 on CPUs",
        minimum=1,
    )
    staging_memory: int = option(
        default_of(WorkerConfig, "staging_memory"),
        help="on GPUs: host memory per worker for staging blocks in transfer, such as 1GiB",
        parse=parse_bytes,
    )
    handover_memory: str = option(
        default_of(WorkerConfig, "handover_memory"),
        help="on GPUs: memory in which blocks in transfer are staged, the host's or the GPU's",
        choices=HANDOVER_MEMORIES,
    )
    scheduling_policy: str = same_option(RouterConfig, "scheduling_policy")
    special_tokens_in_text: bool = same_option(RouterConfig, "special_tokens_in_text")
    message_format: str = same_option(RouterConfig, "message_format")
    unknown_fields: str = same_option(RouterConfig, "unknown_fields")
    trust_request_chat_template: bool = same_option(RouterConfig, "trust_request_chat_template")
    state_url: str | None = same_option(RouterConfig, "state_url")
    state_ttl_s: float = same_option(RouterConfig, "state_ttl_s")
    max_file: int = same_option(RouterConfig, "max_file")
    batch_max_num_seqs: int = same_option(RouterConfig, "batch_max_num_seqs")
    console: bool = same_option(RouterConfig, "console")
    redis_url: str | None = option(None, help="URL of Redis; default: start a private one", metavar="URL")
    redis_prefix: str = option(
        DEFAULT_PREFIX, help="what the names of all keys in Redis begin with", metavar="PREFIX", parse=parse_prefix
    )
    cluster_secret_file: str | None = option(
        None,
        help="file with the secret that routers and workers share; default: PDSERVE_CLUSTER_SECRET, else a new one; "
        "with --redis-url an open cluster",
        metavar="FILE",
    )
    cache_dir: str | None = option(
        None, help="directory of downloaded and converted models; default: in the user's cache directory"
    )
    log_dir: str | None = option(
        None, help="directory of the log files, one per process; default: a new one in the user's state directory"
    )
    log_max_size: int = option(
        64 << 20, help="size at which a log file is rotated, such as 64MiB", parse=parse_bytes, minimum=4096
    )
    log_max_files: int = option(4, help="log files kept of each process, the current one included", minimum=1)
    log_max_runs: int = option(20, help="log directories kept of runs without --log-dir", minimum=1)
    ready_timeout_s: float = option(600.0, help="maximum seconds for each process to become ready", minimum=1)
    hang_timeout_s: float = option(
        30.0, help="seconds without a sign of life after which a hanging process is killed and restarted", minimum=1
    )
    fork_workers: bool = option(
        True, help="fork workers from a process that has imported everything, so that they start fast"
    )
    drain_timeout_s: float = option(45.0, help="maximum seconds for running requests to finish after Ctrl-C", minimum=0)
    log_level: str = option("info", help="minimum level of log lines", choices=LEVELS)
    log_format: str = option("text", help="form of the log files: text, or one JSON object per line", choices=FORMATS)
    audit_log: str | None = option(
        None, help="file for the audit log: admin actions and refusals; default: in the log", metavar="FILE"
    )
    otlp_endpoint: str | None = option(
        None, help="base URL of an OpenTelemetry collector (OTLP over HTTP); without one no traces", metavar="URL"
    )
    trace_sample_ratio: float | None = option(
        None, help="share of the requests to trace, 0 to 1, unless the caller has decided; default: 1", minimum=0
    )

    @property
    def prefill_per_model(self) -> int:
        """Prefill workers of each model."""
        return 1 if self.prefill is None else self.prefill

    @property
    def num_prefill(self) -> int:
        """Prefill workers of all models."""
        return self.prefill_per_model * len(self.model)

    @property
    def num_decode(self) -> int:
        """Decode workers of all models."""
        return self.decode * len(self.model)

    @property
    def num_workers(self) -> int:
        """Workers of both tiers and all models."""
        return self.num_prefill + self.num_decode

    @property
    def num_ranks(self) -> dict[str, int]:
        """Ranks per worker, by tier."""
        return {
            "prefill": self.prefill_tensor_parallel_size or self.tensor_parallel_size,
            "decode": self.decode_tensor_parallel_size or self.tensor_parallel_size,
        }

    @property
    def effective_grpc_port(self) -> int:
        """The port of the gRPC API."""
        return self.port + 1 if self.grpc_port is None else self.grpc_port
