"""Finds out whether the kernel lets this process read another one's memory, without reading any."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

from pdserve.observe.machine import read_number

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
#: The strictest scope under which a process can allow others to read it.
_MAX_PTRACE_SCOPE = 1
_CAP_SYS_PTRACE = 1 << 19


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def ptrace_scope() -> int:
    """Yama's restriction of reading other processes; 0 without Yama."""
    return read_number(_PTRACE_SCOPE) or 0


def scope_refuses(scope: int, capabilities: int) -> bool:
    """Whether Yama's `scope` keeps a process with these effective capabilities from reading others of its user."""
    return scope > _MAX_PTRACE_SCOPE and not capabilities & _CAP_SYS_PTRACE


def read_refusal(pid: int) -> int:
    """The errno with which the kernel refuses to read a process's memory; 0 when it is allowed.

    It reads at address 0, which is never mapped: the kernel checks permission first, and then fails with EFAULT.
    """
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:  # A C library without the call.
        return errno.ENOSYS
    into = ctypes.create_string_buffer(1)
    local, remote = _Span(ctypes.addressof(into), 1), _Span(None, 1)
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if read(ctypes.c_int(pid), ctypes.byref(local), one, ctypes.byref(remote), one, flags) >= 0:
        return 0
    failure = ctypes.get_errno()
    return 0 if failure == errno.EFAULT else failure
