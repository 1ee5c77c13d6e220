"""The path of blocks between two workers: which one is expected, which one the transport took, and why. Pure."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from kvtransfer.transport.local.address import LocalAddress
from pdserve.observe.process_memory import scope_refuses
from pdserve.peers.host_identity import HostIdentity

LOCAL, CUDA_IPC, LOCAL_STAGED, CMA, SHM, RDMA, TCP = (
    "local",
    "cuda_ipc",
    "local_staged",
    "cma",
    "shm",
    "rdma",
    "tcp",
)
#: Values of `TransportPath.expected` and `TransportPath.actual`, fastest first.
PATHS = (LOCAL, CUDA_IPC, LOCAL_STAGED, CMA, SHM, RDMA, TCP)
#: Names in UCX_TLS that mean a path, alone or with others.
_UCX_NAMES = {CUDA_IPC: {"cuda_ipc", "cuda", "all"}, CMA: {"cma", "sm", "shm", "all"}}
_SHM_LANES = ("posix", "sysv", "xpmem", "knem")
#: In the name of a protocol of UCX: what is not host memory passes through it.
_FRAGMENTS = "frag host"
_RDMA_PREFIXES = ("rc", "dc", "ud", "srd", "ib")
#: Paths within a host; between them the choice is the library's.
_WITHIN_HOST = (CUDA_IPC, CMA, SHM)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEndpoint:
    """One end of a transfer: where its process runs, and what its transport offers."""

    host: HostIdentity
    #: Names of the lanes that the library can use here, such as tcp, cma and rc_mlx5.
    lanes: tuple[str, ...]
    #: Whether its blocks are in the memory of a GPU on their way.
    device_memory: bool = False
    #: Paths that UCX_TLS excludes there, so that nobody expects them.
    excluded_paths: frozenset[str] = frozenset()
    #: Where it takes messages from its own host; None: nowhere.
    local: LocalAddress | None = None
    #: UUID of the GPU that has its blocks; empty: they are in host memory.
    gpu: str = ""
    #: UUIDs of the GPUs whose memory that one can read.
    readable_gpus: frozenset[str] = frozenset()
    #: Whether that one can also copy blocks through host memory, which is pinned.
    pins_host_memory: bool = False
    #: Whether others can read its blocks where they are. Known to itself alone.
    is_readable: bool = True

    def can_read(self, gpu: str) -> bool:
        """Whether it can copy blocks from the memory of a GPU of its host; empty: from host memory."""
        return gpu in self.readable_gpus if gpu else not self.gpu

    def with_host_memory(self) -> DataEndpoint:
        """The endpoint of blocks in host memory in the same process."""
        own = replace(self, device_memory=False, gpu="", readable_gpus=frozenset())
        return replace(own, pins_host_memory=False, is_readable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccess:
    """What the kernel answers when this process reads memory with `process_vm_readv`: an errno, 0 if it may."""

    own: int
    #: None: the peer's pid means nothing in this pid namespace.
    peer: int | None
    #: /proc/sys/kernel/yama/ptrace_scope; 0 without Yama.
    ptrace_scope: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPath:
    """The path to one peer, as found when it was connected."""

    expected: str
    actual: str
    #: Why it is not the expected one, and what to do; empty when it is.
    cause: str = ""
    remedy: str = ""
    #: How UCX sends large messages, in its words; empty while it is unknown, and where blocks are not sent.
    protocol: str = field(default="", compare=False)

    @property
    def is_degraded(self) -> bool:
        """Whether the path is slower than the expected one, or UCX does not use it for all of the way."""
        return is_slower(self.actual, self.expected) or _FRAGMENTS in self.protocol

    @property
    def found(self) -> str:
        """The path, and the expected one where that is another."""
        return self.actual if self.actual == self.expected else f"{self.actual} instead of {self.expected}"

    def with_protocol(self, protocol: str) -> TransportPath:
        """The same path, when it is known how UCX sends large messages."""
        if _FRAGMENTS not in protocol or self.cause:
            return replace(self, protocol=protocol)
        cause, remedy = _EXPLAINED_FRAGMENTS
        return replace(self, protocol=protocol, cause=f"{cause} ({protocol})", remedy=remedy)


def is_slower(actual: str, expected: str) -> bool:
    """Whether a path is of a slower kind than another. Host memory has one kind: CMA and shared memory are equals."""
    if actual in (CMA, SHM) and expected in (CMA, SHM):
        return False
    return PATHS.index(actual) > PATHS.index(expected)


def expected_path(own: DataEndpoint, peer: DataEndpoint) -> str:
    """The fastest path that two workers should have, from where they run and what their libraries offer.

    Within a host what counts is what their settings exclude: a library also offers no CMA where the kernel refuses it.
    """
    if own.host.shares_host_with(peer.host):
        is_in_reach = own.local is not None and peer.local is not None and own.local.directory == peer.local.directory
        if is_in_reach and own.is_readable and peer.can_read(own.gpu):
            return LOCAL
        if is_in_reach and own.pins_host_memory and peer.pins_host_memory:
            return LOCAL_STAGED
        excluded = own.excluded_paths | peer.excluded_paths
        if own.device_memory and peer.device_memory and CUDA_IPC not in excluded:
            return CUDA_IPC
        if CMA not in excluded:
            return CMA
    return RDMA if _has_rdma(own.lanes) and _has_rdma(peer.lanes) else TCP


def excluded_paths(ucx_tls: str | None) -> frozenset[str]:
    """The paths within a host that a value of UCX_TLS excludes; None: it is not set."""
    if not ucx_tls:
        return frozenset()
    names = set(ucx_tls.removeprefix("^").split(","))
    named = {path for path, aliases in _UCX_NAMES.items() if names & aliases}
    return frozenset(named if ucx_tls.startswith("^") else _UCX_NAMES.keys() - named)


def actual_path(lanes: Sequence[str], *, device_memory: bool) -> str:
    """The path that bulk data takes over a connection with these lanes."""
    if LOCAL in lanes or LOCAL_STAGED in lanes:
        return lanes[0]
    if device_memory and CUDA_IPC in lanes:
        return CUDA_IPC
    if CMA in lanes:
        return CMA
    if any(lane in _SHM_LANES for lane in lanes):
        return SHM
    return RDMA if _has_rdma(lanes) else TCP


def path_between(own: DataEndpoint, peer: DataEndpoint, lanes: Sequence[str], access: MemoryAccess) -> TransportPath:
    """The path of this worker's connection to a peer; `lanes` are those of the connection."""
    expected = expected_path(own, peer)
    actual = actual_path(lanes, device_memory=own.device_memory and peer.device_memory)
    if not is_slower(actual, expected):
        return TransportPath(expected=expected, actual=actual)
    cause, remedy = _explained(own, peer, expected, access)
    return TransportPath(expected=expected, actual=actual, cause=cause, remedy=remedy)


def _explained(own: DataEndpoint, peer: DataEndpoint, expected: str, access: MemoryAccess) -> tuple[str, str]:
    """Cause and remedy of a path that is slower than the expected one."""
    if expected in (LOCAL, LOCAL_STAGED):
        return _EXPLAINED_LOCAL
    return _explain_within_host(own, peer, access) if expected in _WITHIN_HOST else _EXPLAINED_RDMA


_EXPLAINED_LOCAL = (
    "the peer refused the connection at its socket in --local-sockets, or one of both cannot map or pin memory",
    "This worker's log has the reason, at local_path_refused. Run both workers as one user; let those on GPUs see all "
    "of them. With --local-sockets off, UCX is the expected path.",
)
_EXPLAINED_RDMA = (
    "both UCX libraries offer RDMA, but the connection does not use it",
    "Set UCX_NET_DEVICES to devices of one fabric on both workers, or exclude TCP with UCX_TLS to see UCX's error.",
)
_EXPLAINED_FRAGMENTS = (
    "UCX copies blocks of the GPU through fragments of host memory",
    "Let UCX reach the GPU's memory: nvidia-peermem or dma-buf for RDMA, one pid namespace for cuda_ipc; or use "
    "--handover-memory host.",
)
_JOIN = "Docker: {docker}; Kubernetes: workers of one pod{more}."


def _explain_within_host(own: DataEndpoint, peer: DataEndpoint, access: MemoryAccess) -> tuple[str, str]:
    """Cause and remedy of a slow path within a host."""
    a, b = own.host, peer.host
    if _differ(a.ipc_namespace, b.ipc_namespace):
        joined = _JOIN.format(docker="--ipc container:NAME of one container on both, or --ipc host", more="")
        return "the workers are in different IPC namespaces", f"Put both into one. {joined}"
    if _differ(a.pid_namespace, b.pid_namespace):
        docker = "--pid container:NAME of one container on both, or --pid host"
        joined = _JOIN.format(docker=docker, more=" with shareProcessNamespace: true")
        return "the workers are in different pid namespaces", f"Put both into one. {joined}"
    if _differ(a.user_namespace, b.user_namespace):
        return "the workers are in different user namespaces", "Run both in one user namespace."
    if access.own:
        return (
            f"the kernel refuses process_vm_readv even for a process's own memory ({errno.errorcode[access.own]}), "
            "as a container's seccomp profile does",
            "Add the capability SYS_PTRACE to both workers' containers (Docker: --cap-add SYS_PTRACE), which opens the "
            "call in Docker's profile, or allow process_vm_readv in the seccomp profile.",
        )
    if access.peer == errno.EPERM:
        return _explain_refused(a, b, access.ptrace_scope)
    missing = [name for name, end in (("this worker", own), ("the peer", peer)) if CMA not in end.lanes]
    if missing:
        return (
            f"UCX offers no cma on {' and '.join(missing)}",
            "Unset UCX_TLS, or let it allow cma, on both workers.",
        )
    return (
        "the kernel would allow it; the reason is UCX's own",
        "Start both workers with UCX_LOG_LEVEL=info and look at the connections' lanes.",
    )


def _explain_refused(own: HostIdentity, peer: HostIdentity, ptrace_scope: int) -> tuple[str, str]:
    """Cause and remedy when the kernel does not let this process read the peer's memory."""
    if (own.uid, own.gid) != (peer.uid, peer.gid):
        return (
            f"the workers run as different users ({own.uid}:{own.gid} and {peer.uid}:{peer.gid})",
            "Run both as one user and group.",
        )
    if scope_refuses(ptrace_scope, own.capabilities):
        return (
            f"kernel.yama.ptrace_scope is {ptrace_scope}",
            "Set it to 0 or 1, or with 2 give both workers the capability SYS_PTRACE.",
        )
    if peer.capabilities & ~own.capabilities:
        return (
            "the peer has capabilities that this worker lacks",
            "Give both workers the same capabilities.",
        )
    return (
        "the kernel does not let this worker read the peer's memory (EPERM)",
        "Look for a security module (SELinux, AppArmor, Yama) that forbids ptrace between the workers.",
    )


def _differ(namespace: int, other: int) -> bool:
    return bool(namespace and other) and namespace != other


def _has_rdma(lanes: Collection[str]) -> bool:
    return any(lane.split("_")[0] in _RDMA_PREFIXES for lane in lanes)
