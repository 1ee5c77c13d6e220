"""Asks UCX what it uses: the transports that a context offers, and the lanes and protocols of an endpoint.

ucxx has no calls for the latter, so UCX's own are called, on the library that ucxx has loaded.
"""

from __future__ import annotations

import ctypes
import functools
import re

_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 32
_NAME_BYTES = 32
_SOCKET_ADDRESS_BYTES = 128
#: A table of protocols of tagged messages, by their sizes. UCX guesses those that the other end may change.
_TAGGED = re.compile(r"tagged message by ucp_tag_send\S* from (host|cuda).*?\n# *\n", re.DOTALL)
_LARGEST = re.compile(r"\.\.inf \| (?:\(\?\) )?(.*?) *\|", re.MULTILINE)
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


def protocol_of(endpoint: int, *, device_memory: bool) -> str:
    """How an endpoint sends large messages, as UCX_PROTO_INFO says: such as `rendezvous zero-copy read from remote`.

    `device_memory`: from a GPU's; then it is empty before the first one was sent. Empty, too, if UCX is too old.
    """
    return protocol_in(_description(endpoint), device_memory=device_memory)


def protocol_in(description: str, *, device_memory: bool) -> str:
    """The protocol of large messages in what UCX writes about an endpoint."""
    memory = "cuda" if device_memory else "host"
    tables = (found.group() for found in _TAGGED.finditer(description) if found.group(1) == memory)
    return next((_LARGEST.findall(table)[-1] for table in tables if _LARGEST.search(table)), "")


def _description(endpoint: int) -> str:
    """What `ucp_ep_print_info` writes about an endpoint."""
    print_info = _function("ucp_ep_print_info")
    if print_info is None:
        return ""
    libc, text, num_bytes = ctypes.CDLL(None), ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(num_bytes)))
    try:
        print_info.restype = None
        print_info(ctypes.c_void_p(endpoint), stream)
    finally:
        libc.fclose(stream)
    try:
        return ctypes.string_at(text, num_bytes.value).decode(errors="replace")
    finally:
        libc.free(text)


def _query() -> ctypes._NamedFuncPointer | None:
    """`ucp_ep_query`; None when UCX is older than the call (1.12)."""
    query = _function("ucp_ep_query")
    if query is not None:
        query.restype = ctypes.c_byte
    return query


@functools.cache
def _function(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the loaded library; None when that has none."""
    try:
        # ucxx has loaded libucp, so the loader finds it by its name wherever it lies.
        function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL("libucp.so.0"), name)
    except (OSError, AttributeError):
        return None
    return function
