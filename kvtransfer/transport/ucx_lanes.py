"""Asks UCX which transports it uses: those that a context offers, and the lanes of an endpoint.

ucxx has no call for the latter, so UCX's own `ucp_ep_query` is called, on the library that ucxx has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import re

_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 32
_NAME_BYTES = 32
_SOCKET_ADDRESS_BYTES = 128
_RESOURCE = re.compile(r"resource\s+\d+\s*:.* (\w+)/\S*$", re.MULTILINE)


class _Entry(ctypes.Structure):
    """`ucp_transport_entry_t`."""

    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    """`ucp_transports_t`."""

    _fields_ = (
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _Attributes(ctypes.Structure):
    """`ucp_ep_attr_t`."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("local_address", ctypes.c_char * _SOCKET_ADDRESS_BYTES),
        ("remote_address", ctypes.c_char * _SOCKET_ADDRESS_BYTES),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


def offered_lanes(context_info: str) -> tuple[str, ...]:
    """Names of the transports in a context's description, each once: self, tcp, cma, rc_mlx5, ..."""
    return tuple(dict.fromkeys(_RESOURCE.findall(context_info)))


def lanes_of(endpoint: int) -> tuple[str, ...]:
    """Names of the transports that an endpoint uses, by its handle. Empty when this UCX cannot report them."""
    query = _query()
    if query is None:
        return ()
    entries = (_Entry * _MAX_LANES)()
    attributes = _Attributes(field_mask=_FIELD_TRANSPORTS)
    attributes.transports = _Transports(entries, _MAX_LANES, ctypes.sizeof(_Entry))
    if query(ctypes.c_void_p(endpoint), ctypes.byref(attributes)) != 0:
        return ()
    names = (entry.transport_name for entry in entries[: attributes.transports.num_entries])
    return tuple(dict.fromkeys(name.decode() for name in names if name))


@functools.cache
def _query() -> ctypes._NamedFuncPointer | None:
    """`ucp_ep_query` of the loaded library; None when it is older than the call (UCX 1.12)."""
    try:
        # ucxx has loaded libucp, so the loader finds it by its name wherever it lies.
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        return None
    query.restype = ctypes.c_byte
    return query
