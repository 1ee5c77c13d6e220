"""Which path is expected, which one is taken, and the cause of a slow one."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.path import (
    DataEndpoint,
    MemoryAccess,
    actual_path,
    excluded_paths,
    expected_path,
    path_between,
)
from kvtransfer.transport.ucx_lanes import offered_lanes
from pdserve.peers.host_identity import HostIdentity

HOST = HostIdentity(
    hostname="a",
    boot_id="boot",
    pid=1,
    uid=1000,
    gid=1000,
    capabilities=0,
    pid_namespace=2,
    ipc_namespace=3,
    user_namespace=4,
)
HERE = DataEndpoint(host=HOST, lanes=("self", "tcp", "cma"))
THERE = replace(HERE, host=replace(HOST, boot_id="another"))
ALLOWED = MemoryAccess(own=0, peer=0, ptrace_scope=0)
REFUSED = replace(ALLOWED, peer=errno.EPERM)
SYS_PTRACE = 1 << 19


def with_rdma(end: DataEndpoint) -> DataEndpoint:
    return replace(end, lanes=(*end.lanes, "rc_mlx5"))


@pytest.mark.parametrize(
    ("own", "peer", "path"),
    [
        (HERE, HERE, "cma"),
        (HERE, THERE, "tcp"),
        (with_rdma(HERE), with_rdma(THERE), "rdma"),
        (with_rdma(HERE), THERE, "tcp"),
        (replace(HERE, device_memory=True), replace(HERE, device_memory=True), "cuda_ipc"),
        (replace(HERE, device_memory=True), HERE, "cma"),
    ],
)
def test_the_expected_path_follows_from_hosts_and_libraries(own: DataEndpoint, peer: DataEndpoint, path: str) -> None:
    assert expected_path(own, peer) == path


LOCAL = replace(HERE, local=LocalAddress(directory="d", name="a.sock", token=bytes(32)))
ON_GPU = replace(LOCAL, gpu="GPU-1", readable_gpus=frozenset(("GPU-1", "GPU-2")))
PINNING = replace(ON_GPU, pins_host_memory=True)


@pytest.mark.parametrize(
    ("own", "peer", "path"),
    [
        (LOCAL, LOCAL, "local"),
        (LOCAL, HERE, "cma"),
        (LOCAL, replace(LOCAL, host=THERE.host), "tcp"),
        (ON_GPU, ON_GPU, "local"),
        (replace(ON_GPU, gpu="GPU-2"), ON_GPU, "local"),
        (replace(ON_GPU, gpu="GPU-3"), ON_GPU, "cma"),
        (ON_GPU, LOCAL, "cma"),
        (LOCAL, ON_GPU, "cma"),
        (ON_GPU.with_host_memory(), ON_GPU.with_host_memory(), "local"),
        (PINNING, PINNING, "local"),
        (replace(PINNING, gpu="GPU-3"), PINNING, "local_staged"),
        (replace(PINNING, is_readable=False), PINNING, "local_staged"),
        (replace(ON_GPU, is_readable=False), ON_GPU, "cma"),
        (replace(PINNING, gpu="GPU-3"), ON_GPU, "cma"),
        (replace(ON_GPU, gpu="GPU-3"), PINNING, "cma"),
        (replace(PINNING, gpu="GPU-3"), replace(PINNING, host=THERE.host), "tcp"),
        (LOCAL, PINNING, "cma"),
        (PINNING.with_host_memory(), PINNING.with_host_memory(), "local"),
    ],
)
def test_blocks_stay_within_the_host_where_the_peer_reads_the_memory(
    own: DataEndpoint, peer: DataEndpoint, path: str
) -> None:
    assert expected_path(own, peer) == path


def test_ucx_between_gpus_is_slower_than_copies_from_cache_to_cache() -> None:
    staged = replace(ON_GPU, device_memory=True)
    path = path_between(staged, staged, ("cuda_ipc", "tcp"), ALLOWED)
    assert (path.expected, path.actual, path.is_degraded) == ("local", "cuda_ipc", True)
    assert "local_path_refused" in path.remedy


@pytest.mark.parametrize(("lanes", "is_degraded"), [(("local_staged",), False), (("tcp", "cma"), True)])
def test_blocks_of_gpus_that_do_not_read_each_other_stay_within_the_host(
    lanes: tuple[str, ...], is_degraded: bool
) -> None:
    path = path_between(replace(PINNING, gpu="GPU-3"), PINNING, lanes, ALLOWED)
    assert (path.expected, path.actual, path.is_degraded) == ("local_staged", lanes[-1], is_degraded)


@pytest.mark.parametrize(
    ("ucx_tls", "excluded"),
    [
        (None, set()),
        ("", set()),
        ("^posix,sysv", set()),
        ("all", set()),
        ("tcp,cma,cuda", set()),
        ("self,tcp", {"cma", "cuda_ipc"}),
        ("^posix,sysv,cma", {"cma"}),
        ("^sm,cuda_ipc", {"cma", "cuda_ipc"}),
    ],
)
def test_what_settings_exclude_follows_from_ucx_tls(ucx_tls: str | None, excluded: set[str]) -> None:
    assert excluded_paths(ucx_tls) == excluded


def test_what_either_end_excludes_is_not_expected() -> None:
    lanes = ("self", "tcp")
    tcp_only = replace(HERE, lanes=lanes, excluded_paths=excluded_paths("self,tcp"))
    for own, peer in ((tcp_only, HERE), (HERE, tcp_only), (tcp_only, tcp_only)):
        path = path_between(own, peer, lanes, ALLOWED)
        assert (path.expected, path.actual, path.is_degraded) == ("tcp", "tcp", False)
    assert expected_path(with_rdma(tcp_only), with_rdma(HERE)) == "rdma"
    on_gpus = replace(HERE, device_memory=True, excluded_paths=excluded_paths("^cuda_ipc"))
    assert expected_path(on_gpus, on_gpus) == "cma"


def test_a_refused_system_call_is_degraded_although_ucx_then_offers_no_cma() -> None:
    without_cma = replace(HERE, lanes=("self", "tcp"))
    path = path_between(without_cma, without_cma, ("tcp",), replace(ALLOWED, own=errno.EPERM))
    assert (path.expected, path.is_degraded) == ("cma", True)


def test_an_unknown_boot_is_no_shared_host() -> None:
    unknown = replace(HERE, host=replace(HOST, boot_id=""))
    assert expected_path(unknown, unknown) == "tcp"


@pytest.mark.parametrize(
    ("lanes", "device_memory", "path"),
    [
        (("tcp", "cma"), False, "cma"),
        (("tcp", "posix"), False, "shm"),
        (("tcp",), False, "tcp"),
        (("tcp", "rc_mlx5"), False, "rdma"),
        (("tcp", "cma", "cuda_ipc"), True, "cuda_ipc"),
        (("tcp", "cma", "cuda_ipc"), False, "cma"),
    ],
)
def test_the_path_is_the_fastest_lane(lanes: Sequence[str], device_memory: bool, path: str) -> None:
    assert actual_path(lanes, device_memory=device_memory) == path


def test_shared_memory_is_as_good_as_reading_the_peer() -> None:
    assert not path_between(HERE, HERE, ("tcp", "posix"), ALLOWED).is_degraded


def test_tcp_between_hosts_without_rdma_is_as_expected() -> None:
    path = path_between(HERE, THERE, ("tcp",), ALLOWED)
    assert (path.is_degraded, path.cause, path.remedy) == (False, "", "")


@pytest.mark.parametrize(
    ("peer", "access", "cause"),
    [
        (replace(HOST, ipc_namespace=9, pid_namespace=9), ALLOWED, "different IPC namespaces"),
        (replace(HOST, pid_namespace=9), ALLOWED, "different pid namespaces"),
        (replace(HOST, user_namespace=9), ALLOWED, "different user namespaces"),
        (HOST, replace(ALLOWED, own=errno.EPERM), "even for a process's own memory (EPERM)"),
        (replace(HOST, uid=0), REFUSED, "different users (1000:1000 and 0:1000)"),
        (replace(HOST, gid=0), REFUSED, "different users (1000:1000 and 1000:0)"),
        (HOST, replace(REFUSED, ptrace_scope=2), "ptrace_scope is 2"),
        (replace(HOST, capabilities=SYS_PTRACE), replace(REFUSED, ptrace_scope=1), "capabilities that this worker"),
        (HOST, REFUSED, "(EPERM)"),
        (HOST, ALLOWED, "UCX's own"),
        # What could not be read is not a difference.
        (replace(HOST, pid_namespace=0, ipc_namespace=0, user_namespace=0), ALLOWED, "UCX's own"),
    ],
)
def test_the_cause_of_tcp_within_a_host_is_named_with_a_remedy(
    peer: HostIdentity, access: MemoryAccess, cause: str
) -> None:
    path = path_between(HERE, replace(HERE, host=peer), ("tcp",), access)
    assert (path.expected, path.actual, path.is_degraded) == ("cma", "tcp", True)
    assert cause in path.cause
    assert path.remedy.endswith(".")


@pytest.mark.parametrize(
    ("own", "peer", "names"), [(("tcp",), HERE.lanes, "this worker"), (HERE.lanes, ("tcp",), "the peer")]
)
def test_a_library_without_cma_is_named(own: tuple[str, ...], peer: tuple[str, ...], names: str) -> None:
    path = path_between(replace(HERE, lanes=own), replace(HERE, lanes=peer), ("tcp",), ALLOWED)
    assert path.cause == f"UCX offers no cma on {names}"


def test_tcp_between_hosts_with_rdma_is_degraded() -> None:
    path = path_between(with_rdma(HERE), with_rdma(THERE), ("tcp",), ALLOWED)
    assert (path.expected, path.actual, path.is_degraded) == ("rdma", "tcp", True)
    assert "UCX_NET_DEVICES" in path.remedy


def test_the_lanes_on_offer_are_read_from_the_description_of_a_context() -> None:
    info = """
#            md 0  :  component 0  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 10 :  md 4  dev 0  flags a- rc_mlx5/mlx5_0:1
#      resource 5  :  md 4  dev 0  flags -- cma/memory
"""
    assert offered_lanes(info) == ("self", "tcp", "rc_mlx5", "cma")
