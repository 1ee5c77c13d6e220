"""Facts of a healthy machine and worker for tests."""

from __future__ import annotations

from pdserve.observe.facts.cluster import RedisFacts, WorkerFacts
from pdserve.observe.facts.machine import Folder, MachineFacts
from pdserve.peers.host_identity import HostIdentity
from tests.support.records import LAYOUT

GIB = 1 << 30

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
MACHINE = MachineFacts(
    host=HOST,
    version="1.0.0",
    python="3.11.7",
    kernel="6.1",
    architecture="x86_64",
    num_cores=8,
    cpu_features=("avx2", "avx512f"),
    has_native_kernels=True,
    total_memory_bytes=64 * GIB,
    available_memory_bytes=32 * GIB,
    memlock_bytes=8 << 20,
    open_files=65536,
    shm_bytes=8 * GIB,
    folders=(Folder(path="/var/cache/pdserve", free_bytes=100 * GIB), Folder(path="/tmp", free_bytes=100 * GIB)),
    num_gpus=0,
    num_gpu_nodes=0,
    cuda_visible_devices=None,
    rdma_devices=(),
    read_refusal=0,
    filter_refusal=0,
    ptrace_scope=0,
    ucx_variables={},
    packages={"torch": "2.13.0+cpu", "ucxx-cu13": "0.52.0", "libucx-cu13": "1.21.0"},
)
REDIS = RedisFacts(
    address="redis:6379",
    version="7.2.1",
    latency_s=0.0004,
    used_memory_bytes=10 << 20,
    max_memory_bytes=0,
    eviction="noeviction",
)


def worker_facts(worker_id: str, tier: str) -> WorkerFacts:
    """A healthy worker."""
    return WorkerFacts(
        worker_id=worker_id,
        tier=tier,
        layout=LAYOUT,
        transport="ucx",
        device="cpu",
        kernels="cpu",
        instruction_set="avx512",
        unix_time_s=1.7e9,
        machine=MACHINE,
        redis=REDIS,
    )
