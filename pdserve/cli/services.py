"""Command lines and environments of a cluster's processes, as values for the supervisor. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from decode_svc.config import DecodeConfig
from pdserve.base.config import default_of
from pdserve.cli.cluster_plan import ClusterPlan, PlannedWorker, PreparedModel
from pdserve.cli.placement import CoreShare, GpuShare
from pdserve.cli.supervisor.spec import ProcessSpec
from prefill_svc.config import PrefillConfig
from router_svc.config import RouterConfig

_SETTINGS: Mapping[str, type[RouterConfig | PrefillConfig | DecodeConfig]] = {
    "router_svc": RouterConfig,
    "prefill_svc": PrefillConfig,
    "decode_svc": DecodeConfig,
    "worker_svc.prefill": DecodeConfig,
    "worker_svc.decode": DecodeConfig,
}

ROUTER_STAGE, WORKER_STAGE, REDIS_STAGE = 0, 1, 2

#: Time a service needs to close its sockets after its drain, which ends after `drain_timeout_s`.
_CLOSE_GRACE_S = 20.0


def router_spec(plan: ClusterPlan) -> ProcessSpec:
    """The router's process."""
    config = plan.config
    flags = {
        **_common_flags(plan, plan.models),
        "alias": [*config.alias],
        "host": config.host,
        "port": config.port,
        "grpc-port": config.grpc_port,
        "admin-port": config.admin_port,
        "ssl-certfile": config.ssl_certfile,
        "ssl-keyfile": config.ssl_keyfile,
        "ssl-ca-certs": config.ssl_ca_certs,
        "ssl-cert-reqs": config.ssl_cert_reqs,
        "api-keys-file": config.api_keys_file,
        "allowed-hosts": config.allowed_hosts,
        "allowed-origins": config.allowed_origins,
        "prefill-expected": config.prefill_per_model,
        "trace-sample-ratio": config.trace_sample_ratio,
        "local-prefill-threshold": config.local_prefill_threshold,
        "local-prefill": config.local_prefill,
        "special-tokens-in-text": config.special_tokens_in_text,
        "message-format": config.message_format,
        "unknown-fields": config.unknown_fields,
        "trust-request-chat-template": config.trust_request_chat_template,
        "state-ttl-s": config.state_ttl_s,
        "max-file": config.max_file,
        "batch-max-num-seqs": config.batch_max_num_seqs,
        "console": config.console,
        "scheduling-policy": config.scheduling_policy,
    }
    router = _service(plan, "router", "router_svc", flags, threads=1, stage=ROUTER_STAGE)
    # Not flags, which every user of the machine can see.
    secret = {"PDSERVE_ROUTER__API_KEY": " ".join(config.api_key), "PDSERVE_ROUTER__STATE_URL": config.state_url or ""}
    return replace(router, environment={**router.environment, **{name: text for name, text in secret.items() if text}})


def worker_specs(plan: ClusterPlan) -> list[ProcessSpec]:
    """The workers' processes, in the order of `plan.shares`."""
    workers = plan.workers
    gpus: Sequence[GpuShare | None] = plan.gpus or [None] * len(workers)
    return [
        _worker_spec(plan, worker, share, gpu) for worker, share, gpu in zip(workers, plan.shares, gpus, strict=True)
    ]


def _worker_spec(plan: ClusterPlan, worker: PlannedWorker, share: CoreShare, gpu: GpuShare | None) -> ProcessSpec:
    config, name, tier = plan.config, worker.name, worker.tier
    can_change_role = gpu is None and config.num_ranks[tier] == 1 and config.transport == "ucx"
    may_decode = can_change_role or tier == "decode"
    flags = {
        **_common_flags(plan, [worker.model]),
        "worker-id": plan.id_prefix + name,
        "tensor-parallel-size": config.num_ranks[tier],
        "device": None if gpu is None else gpu.device,
        "gpu-memory-utilization": None if gpu is None else gpu.memory,
        "deterministic": config.deterministic,
        "enforce-eager": config.enforce_eager,
        "dtype": config.dtype,
        "kv-cache-dtype": config.kv_cache_dtype,
        "kernels": config.kernels,
        "quantization": config.quantization,
        "block-size": config.block_size,
        "kv-cache-memory": plan.kv_cache_bytes,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs if may_decode else None,
        "itl-budget-ms": config.itl_budget_ms if may_decode else None,
        "layer-groups": config.layer_groups if may_decode else None,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "threads": share.threads,
        "cpus": _cpu_list(share.cpus),
        "borrow-cpus": _cpu_list(share.borrow_cpus),
        "core-leases": plan.core_leases if share.borrow_cpus else None,
        "staging-memory": config.staging_memory,
        "handover-memory": config.handover_memory,
        "transport": config.transport,
    }
    module = f"worker_svc.{tier}" if can_change_role else f"{tier}_svc"
    spec = _service(plan, name, module, flags, threads=share.threads, stage=WORKER_STAGE)
    return replace(spec, is_forked=True)


def _cpu_list(cpus: Sequence[int]) -> str | None:
    return ",".join(map(str, cpus)) or None


def _common_flags(plan: ClusterPlan, models: Sequence[PreparedModel]) -> dict[str, object]:
    return {
        "model": [model.path for model in models],
        "served-model-name": [model.served_name for model in models],
        "drain-timeout-s": plan.config.drain_timeout_s,
        "redis-prefix": plan.config.redis_prefix,
        "log-level": plan.config.log_level,
        "log-format": plan.config.log_format,
        "audit-log": plan.config.audit_log,
        "cluster-secret-file": plan.config.cluster_secret_file,
        "otlp-endpoint": plan.config.otlp_endpoint,
    }


def _service(
    plan: ClusterPlan, name: str, module: str, flags: Mapping[str, object], *, threads: int, stage: int
) -> ProcessSpec:
    settings, section = _SETTINGS[module], module.removeprefix("worker_svc.").removesuffix("_svc")
    given = [
        (f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag}={_text(value)}"
        for flag, values in flags.items()
        # A list is a flag for each of its values.
        for value in (values if isinstance(values, list) else [values])
        # A value equal to the service's default is omitted, so that the service's environment can override it.
        if value is not None and value != default_of(settings, flag.replace("-", "_"))
    ]
    return ProcessSpec(
        name=name,
        argv=(sys.executable, *plan.python_flags, "-m", module, *given),
        # Not a flag: the URL may carry a password, and every user of the machine can see the flags.
        environment={
            **plan.environment,
            **thread_environment(threads),
            f"PDSERVE_{section.upper()}__REDIS_URL": plan.redis_url,
        },
        log_path=plan.log_dir / f"{name}.log",
        log_format=plan.config.log_format,
        ready_timeout_s=plan.config.ready_timeout_s,
        hang_timeout_s=plan.config.hang_timeout_s,
        stop_grace_s=plan.config.drain_timeout_s + _CLOSE_GRACE_S,
        stop_stage=stage,
    )


def _text(value: object) -> str:
    """The value of a flag. Words are joined, as `words_option` joins them."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def thread_environment(threads: int) -> dict[str, str]:
    """Bounds the thread pools of libraries, which would otherwise size them by the machine."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
