"""Asks the kernel whether this process may read a peer's memory."""

from __future__ import annotations

import os

from kvtransfer.transport.path import MemoryAccess
from pdserve.observe.process_memory import ptrace_scope, read_refusal
from pdserve.peers.host_identity import HostIdentity


def memory_access(own: HostIdentity, peer: HostIdentity) -> MemoryAccess:
    """What the kernel answers to this process about itself and about the peer."""
    reachable = own.shares_host_with(peer) and own.pid_namespace == peer.pid_namespace
    return MemoryAccess(
        own=read_refusal(os.getpid()),
        peer=read_refusal(peer.pid) if reachable else None,
        ptrace_scope=ptrace_scope(),
    )
