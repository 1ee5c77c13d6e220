"""The wire format of `DataEndpoint`, checked."""

from __future__ import annotations

from contextlib import suppress

from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.path import PATHS, DataEndpoint
from pdserve.base.errors import PeerLost, RequestError
from pdserve.observe.facts.wire import host_from_proto, host_to_proto
from pdserve.v1 import decode_pb2

#: Limits on what a peer may claim.
_MAX_LANES = 64
_MAX_GPUS = 64
_MAX_TEXT = 255


def endpoint_to_proto(endpoint: DataEndpoint) -> decode_pb2.DataEndpoint:
    """The endpoint as it travels in tickets."""
    local = b"" if endpoint.local is None else endpoint.local.pack()
    return decode_pb2.DataEndpoint(
        host=host_to_proto(endpoint.host),
        lanes=endpoint.lanes,
        device_memory=endpoint.device_memory,
        excluded_paths=sorted(endpoint.excluded_paths),
        local_address=b"" if endpoint.gpu else local,
        gpu_local_address=local if endpoint.gpu else b"",
        gpu=endpoint.gpu,
        readable_gpus=sorted(endpoint.readable_gpus),
        pins_host_memory=endpoint.pins_host_memory,
    )


def endpoint_from_proto(message: decode_pb2.DataEndpoint) -> DataEndpoint:
    """The endpoint of a ticket. Raises: RequestError when no worker could have it."""
    host = host_from_proto(message.host)
    lanes = tuple(message.lanes)
    longest = max(map(len, (host.hostname, host.boot_id, message.gpu, *lanes, *message.readable_gpus)))
    if len(lanes) > _MAX_LANES or len(message.readable_gpus) > _MAX_GPUS or longest > _MAX_TEXT:
        raise RequestError(
            f"Malformed transfer message: data_endpoint has {len(lanes)} lanes, {len(message.readable_gpus)} GPUs and "
            f"texts of {longest} characters; at most {_MAX_LANES}, {_MAX_GPUS} and {_MAX_TEXT}."
        )
    local = None
    with suppress(PeerLost):  # A later release may write it in another way: then UCX is taken.
        packed = message.gpu_local_address if message.gpu else message.local_address
        local = LocalAddress.unpack(packed) if packed else None
    return DataEndpoint(
        host=host,
        lanes=lanes,
        device_memory=message.device_memory,
        excluded_paths=frozenset(message.excluded_paths) & frozenset(PATHS),
        local=local,
        gpu=message.gpu,
        readable_gpus=frozenset(message.readable_gpus),
        pins_host_memory=message.pins_host_memory,
    )
