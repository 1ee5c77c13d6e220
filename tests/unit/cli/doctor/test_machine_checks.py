"""Each fault of a machine is found, named and has a remedy; a healthy machine has none."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pdserve.cli.doctor.finding import Severity, exit_status
from pdserve.cli.doctor.machine_checks import check_machine
from pdserve.observe.facts.machine import Folder
from tests.support.machine import GIB, HOST, MACHINE

GPUS = {
    "num_gpus": 2,
    "num_gpu_nodes": 2,
    "packages": {"torch": "2.13.0+cu130", "triton": "3.6.0", "ucxx-cu13": "0.52.0"},
}
SYS_PTRACE = 1 << 19


def test_a_healthy_machine_needs_nothing() -> None:
    findings = check_machine(MACHINE, "m")
    assert {finding.severity for finding in findings} == {Severity.OK}
    assert exit_status(findings) == 0
    assert {"versions", "memory", "open_files", "shm", "memory_access", "kernels", "disk"} <= {
        finding.check for finding in findings
    }


@pytest.mark.parametrize(
    ("changes", "check", "severity", "words"),
    [
        ({"available_memory_bytes": GIB // 2}, "memory", Severity.ERROR, "512 MiB of 64.0 GiB"),
        ({"available_memory_bytes": GIB + 1}, "memory", Severity.WARNING, "1.0 GiB"),
        ({"open_files": 256}, "open_files", Severity.ERROR, "256 open files"),
        ({"open_files": 600}, "open_files", Severity.WARNING, "600 open files"),
        (
            {"rdma_devices": ("mlx5_0",), "packages": GPUS["packages"]},
            "memlock",
            Severity.WARNING,
            "8 MiB may be locked",
        ),
        ({"rdma_devices": ("mlx5_0",), "memlock_bytes": -1}, "rdma", Severity.INFO, "mlx5_0"),
        ({"shm_bytes": 0}, "shm", Severity.WARNING, "no /dev/shm"),
        ({**GPUS, "shm_bytes": 64 << 20}, "shm", Severity.WARNING, "64 MiB, too little for NCCL"),
        ({"read_refusal": errno.EPERM}, "memory_access", Severity.WARNING, "refused (EPERM)"),
        ({"filter_refusal": errno.EPERM}, "transport_guard", Severity.WARNING, "refused (EPERM)"),
        ({"ptrace_scope": 2}, "memory_access", Severity.WARNING, "ptrace_scope is 2"),
        ({"ucx_variables": {"UCX_TLS": "tcp,posix,cma"}}, "ucx_tls", Severity.WARNING, "(posix)"),
        ({"ucx_variables": {"UCX_TLS": "tcp,self"}}, "ucx_tls", Severity.INFO, "excludes cma"),
        ({"ucx_variables": {"UCX_TLS": "^posix,sysv,cma"}}, "ucx_tls", Severity.INFO, "excludes cma"),
        ({"ucx_variables": {"UCX_NET_DEVICES": "eth0"}}, "ucx_tls", Severity.INFO, "UCX_NET_DEVICES=eth0"),
        ({**GPUS, "num_gpu_nodes": 0}, "gpus", Severity.ERROR, "no /dev/nvidia* can be opened"),
        ({**GPUS, "cuda_visible_devices": ""}, "gpus", Severity.WARNING, "hides all GPUs"),
        ({**GPUS, "packages": MACHINE.packages}, "packages", Severity.WARNING, "2.13.0+cpu is a build for CPUs"),
        (
            {**GPUS, "packages": {"torch": "2.13.0+cu130", "ucxx-cu13": "0.52"}},
            "packages",
            Severity.WARNING,
            "no triton",
        ),
        ({"packages": {}}, "packages", Severity.INFO, "torch and ucxx not installed"),
        ({"has_native_kernels": False}, "kernels", Severity.WARNING, "were not built"),
        ({"cpu_features": ()}, "kernels", Severity.WARNING, "no AVX2"),
        ({"folders": (Folder(path="/c", free_bytes=0),)}, "disk", Severity.ERROR, "0 MiB free in /c"),
        ({"folders": (Folder(path="/c", free_bytes=GIB),)}, "disk", Severity.WARNING, "1.0 GiB free in /c"),
    ],
)
def test_a_fault_is_found_with_its_remedy(
    changes: Mapping[str, object], check: str, severity: Severity, words: str
) -> None:
    facts = replace(MACHINE, **changes)  # type: ignore[arg-type]
    [finding] = [found for found in check_machine(facts, "m") if found.remedy or found.severity is not Severity.OK]
    assert (finding.check, finding.severity, finding.subject) == (check, severity, "m")
    assert words in finding.found
    assert finding.remedy.endswith(".") or finding.severity is Severity.INFO


MIB = 1 << 20


@pytest.mark.parametrize(
    ("available", "severity"),
    [(16 * MIB, Severity.ERROR), (48 * MIB, Severity.WARNING), (200 * MIB, Severity.OK)],
)
def test_a_loaded_worker_and_a_router_need_little_more_memory(available: int, severity: Severity) -> None:
    worker = replace(MACHINE, available_memory_bytes=available)
    router = replace(worker, packages={})
    for findings in (check_machine(worker, "w", is_loaded=True), check_machine(router, "r")):
        assert [each.severity for each in findings if each.check == "memory"] == [severity]


def test_a_router_is_not_judged_as_a_worker() -> None:
    router = replace(
        MACHINE,
        packages={},
        read_refusal=errno.EPERM,
        ptrace_scope=3,
        shm_bytes=0,
        ucx_variables={"UCX_TLS": "all"},
        has_native_kernels=False,
    )
    findings = check_machine(router, "r")
    assert exit_status(findings) == 0
    assert {each.check for each in findings} == {"versions", "packages", "open_files", "disk", "memory"}


@pytest.mark.parametrize(
    "changes",
    [
        {"open_files": -1},
        {"ptrace_scope": 1},
        {"ptrace_scope": 2, "host": replace(HOST, capabilities=SYS_PTRACE)},
        {"architecture": "aarch64", "cpu_features": ()},
        GPUS,
    ],
)
def test_what_is_no_fault_is_not_reported(changes: Mapping[str, object]) -> None:
    facts = replace(MACHINE, **changes)  # type: ignore[arg-type]
    assert exit_status(check_machine(facts, "m")) == 0
