"""Finds out whether the kernel lets this process put a filter on its own TCP sockets."""

from __future__ import annotations

import ctypes
import socket
import struct

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
#: A classic BPF program that keeps every segment.
_KEEP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0xFFFFFFFF))
#: `struct sock_fprog`
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_KEEP))


def filter_refusal() -> int:
    """The errno with which the kernel refuses; 0 when it is allowed.

    Many kernels allow it to every process. Others (seen: Linux 6.18) demand CAP_NET_ADMIN.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as own:
        try:
            own.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, _PROGRAM)
        except OSError as error:
            return error.errno or -1
    return 0
