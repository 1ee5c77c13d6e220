"""Checks of one machine, container and installation, from facts alone. Pure."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from pdserve.cli.byte_sizes import GIB, MIB, binary_size
from pdserve.cli.doctor.finding import Finding, error, info, ok, warning
from pdserve.observe.facts.machine import UNLIMITED, MachineFacts
from pdserve.observe.process_memory import scope_refuses

#: Limits below which a finding is an error, or a warning.
_MIN_MEMORY, _LOW_MEMORY = GIB, 2 * GIB
#: What a router still takes, or a worker once its model and KV cache are in memory.
_MIN_HEADROOM, _LOW_HEADROOM = 32 * MIB, 64 * MIB
_MIN_FILES, _LOW_FILES = 512, 1024
_MIN_DISK, _LOW_DISK = 256 * MIB, 2 * GIB
_LOW_SHM = GIB
_X86 = "x86_64"


def check_machine(facts: MachineFacts, subject: str, *, is_loaded: bool = False) -> list[Finding]:
    """All findings about one machine; `subject` names it.

    `is_loaded`: the facts are those of a worker, whose model and KV cache are in memory already. Where no worker can
    run, only what a router needs is checked.
    """
    runs_workers = not _missing_packages(facts)
    checks = (*_CHECKS, *_WORKER_CHECKS) if runs_workers else _CHECKS
    findings = [finding for check in checks for finding in check(facts, subject)]
    return [*findings, _memory(facts, subject, has_little_to_load=is_loaded or not runs_workers)]


def _versions(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    yield ok(
        "versions",
        subject,
        f"pdserve {facts.version}, Python {facts.python}, Linux {facts.kernel} {facts.architecture}"
        + (f", {packages}" if packages else ""),
    )


def _missing_packages(facts: MachineFacts) -> list[str]:
    """Packages that workers need and that are not installed."""
    has_ucx = any(name.startswith("ucxx") for name in facts.packages)
    return [name for name, there in (("torch", "torch" in facts.packages), ("ucxx", has_ucx)) if not there]


def _packages(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    missing = _missing_packages(facts)
    if missing:
        yield info(
            "packages",
            subject,
            f"{' and '.join(missing)} not installed: a router runs here, workers do not",
            "To run workers, install pdserve with an extra: cpu, cuda12 or cuda13.",
        )
    elif facts.num_gpus and facts.packages["torch"].endswith("+cpu"):
        yield warning(
            "packages",
            subject,
            f"{facts.num_gpus} GPUs, but torch {facts.packages['torch']} is a build for CPUs",
            "Install torch for CUDA, and pdserve with the extra cuda12 or cuda13.",
        )
    elif facts.num_gpus and "triton" not in facts.packages:
        yield warning("packages", subject, "GPUs, but no triton", "Install pdserve with the extra cuda12 or cuda13.")


def _memory(facts: MachineFacts, subject: str, *, has_little_to_load: bool) -> Finding:
    least, low = (_MIN_HEADROOM, _LOW_HEADROOM) if has_little_to_load else (_MIN_MEMORY, _LOW_MEMORY)
    found = f"{binary_size(facts.available_memory_bytes)} of {binary_size(facts.total_memory_bytes)} memory available"
    remedy = "Stop other programs, raise the container's memory limit, or use a machine with more memory."
    if facts.available_memory_bytes < least:
        return error("memory", subject, found, remedy)
    if facts.available_memory_bytes < low:
        return warning("memory", subject, found, remedy)
    return ok("memory", subject, found)


def _open_files(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    found = f"{facts.open_files} open files allowed" if facts.open_files != UNLIMITED else "open files not limited"
    remedy = "Raise it: ulimit -n 65536; Docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536."
    if facts.open_files != UNLIMITED and facts.open_files < _MIN_FILES:
        yield error("open_files", subject, found, remedy)
    elif facts.open_files != UNLIMITED and facts.open_files < _LOW_FILES:
        yield warning("open_files", subject, found, remedy)
    else:
        yield ok("open_files", subject, found)


def _locked_memory(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    if not facts.rdma_devices:
        return
    if facts.memlock_bytes != UNLIMITED and facts.memlock_bytes < facts.total_memory_bytes:
        yield warning(
            "memlock",
            subject,
            f"{binary_size(facts.memlock_bytes)} may be locked, but RDMA locks the KV cache",
            "Raise it: ulimit -l unlimited; Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity.",
        )
    else:
        yield ok("memlock", subject, "locked memory is not limited")


def _rdma(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    if facts.rdma_devices and any(name.startswith("libucx") for name in facts.packages):
        yield info(
            "rdma",
            subject,
            f"RDMA devices ({', '.join(facts.rdma_devices)}), which the PyPI build of libucx cannot use",
            "Use the system's UCX: RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true.",
        )


def _shared_memory(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    remedy = "Give the container more: --shm-size 1g, or --ipc host; Kubernetes: an emptyDir of medium Memory."
    if not facts.shm_bytes:
        yield warning("shm", subject, "no /dev/shm, in which workers lend each other cores", remedy)
    elif facts.num_gpu_nodes > 1 and facts.shm_bytes < _LOW_SHM:
        found = f"/dev/shm has {binary_size(facts.shm_bytes)}, too little for NCCL between {facts.num_gpu_nodes} GPUs"
        yield warning("shm", subject, found, remedy)
    else:
        yield ok("shm", subject, f"/dev/shm has {binary_size(facts.shm_bytes)}")


def _memory_access(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    if facts.read_refusal:
        name = errno.errorcode.get(facts.read_refusal, str(facts.read_refusal))
        yield warning(
            "memory_access",
            subject,
            f"process_vm_readv is refused ({name}), as by a container's seccomp profile: blocks take TCP, not CMA",
            "Add the capability SYS_PTRACE (Docker: --cap-add SYS_PTRACE), or allow the call in the seccomp profile.",
        )
    elif scope_refuses(facts.ptrace_scope, facts.host.capabilities):
        yield warning(
            "memory_access",
            subject,
            f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: blocks take TCP, not CMA",
            "Set it to 0 or 1, or with 2 give workers the capability SYS_PTRACE.",
        )
    else:
        yield ok("memory_access", subject, "processes of one user may read each other's memory (CMA)")


def _guard(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    if facts.filter_refusal:
        name = errno.errorcode.get(facts.filter_refusal, str(facts.filter_refusal))
        yield warning(
            "transport_guard",
            subject,
            f"filters on TCP sockets are refused ({name}): who reaches the ports of UCX can run code in a worker",
            "Let only workers reach them (docs/operations/transports.md), or give workers the capability NET_ADMIN.",
        )
    else:
        yield ok("transport_guard", subject, "the kernel can keep strangers out of the ports of UCX")


def _ucx_variables(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    tls = facts.ucx_variables.get("UCX_TLS", "")
    listed = set() if tls.startswith("^") else set(tls.split(","))
    risky = sorted(listed & {"posix", "sysv", "shm", "sm", "all"})
    if risky:
        yield warning(
            "ucx_tls",
            subject,
            f"UCX_TLS={tls} allows shared-memory queues ({', '.join(risky)}), which a killed peer can jam",
            "Unset UCX_TLS, or leave these out.",
        )
    elif tls and (("cma" in tls) if tls.startswith("^") else "cma" not in listed):
        yield info(
            "ucx_tls",
            subject,
            f"UCX_TLS={tls} excludes cma: blocks of workers on one host take TCP, as between pods",
            "For workers that could read each other's memory, unset UCX_TLS or allow cma.",
        )
    elif facts.ucx_variables:
        listed_all = ", ".join(f"{name}={value}" for name, value in sorted(facts.ucx_variables.items()))
        yield info("ucx_tls", subject, f"UCX settings in the environment: {listed_all}")


def _gpus(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    if not facts.num_gpus:
        return
    if not facts.num_gpu_nodes:
        yield error(
            "gpus",
            subject,
            f"the driver has {facts.num_gpus} GPUs, but no /dev/nvidia* can be opened",
            "Pass the GPUs to the container (Docker: --gpus all), and check the device nodes' permissions.",
        )
    elif facts.cuda_visible_devices is not None and not facts.cuda_visible_devices.strip():
        yield warning(
            "gpus", subject, "CUDA_VISIBLE_DEVICES is empty and hides all GPUs", "Unset it, or name the GPUs to use."
        )
    else:
        yield ok("gpus", subject, f"{facts.num_gpus} GPUs, {facts.num_gpu_nodes} usable")


def _kernels(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    if not facts.has_native_kernels:
        yield warning(
            "kernels",
            subject,
            "the C++ kernels were not built: CPU workers use plain torch, which is several times slower",
            "Install a C++ compiler and install pdserve again; docs/operations/building.md.",
        )
    elif facts.architecture == _X86 and "avx2" not in facts.cpu_features:
        yield warning(
            "kernels", subject, "the processor has no AVX2: CPU workers are slow", "Use a processor from 2015 or later."
        )
    else:
        yield ok("kernels", subject, f"C++ kernels are built; {facts.num_cores} cores, {_features(facts)}")


def _disk(facts: MachineFacts, subject: str) -> Iterator[Finding]:
    for folder in facts.folders:
        found = f"{binary_size(folder.free_bytes)} free in {folder.path}"
        remedy = "Free space there, or put models and logs elsewhere with --cache-dir and --log-dir."
        if folder.free_bytes < _MIN_DISK:
            yield error("disk", subject, found, remedy)
        elif folder.free_bytes < _LOW_DISK:
            yield warning("disk", subject, found, remedy)
        else:
            yield ok("disk", subject, found)


def _features(facts: MachineFacts) -> str:
    return ", ".join(facts.cpu_features) or "no vector extensions known"


_CHECKS: tuple[Callable[[MachineFacts, str], Iterator[Finding]], ...] = (
    _versions,
    _packages,
    _open_files,
    _disk,
)
_WORKER_CHECKS: tuple[Callable[[MachineFacts, str], Iterator[Finding]], ...] = (
    _locked_memory,
    _rdma,
    _shared_memory,
    _memory_access,
    _guard,
    _ucx_variables,
    _gpus,
    _kernels,
)
