"""The wire format of `DataEndpoint`, checked."""

from __future__ import annotations

from dataclasses import asdict, fields

from kvtransfer.transport.path import DataEndpoint
from pdserve.base.errors import RequestError
from pdserve.base.host_identity import HostIdentity
from pdserve.v1 import decode_pb2

#: Limits on what a peer may claim.
_MAX_LANES = 64
_MAX_TEXT = 255


def endpoint_to_proto(endpoint: DataEndpoint) -> decode_pb2.DataEndpoint:
    """The endpoint as it travels in tickets."""
    return decode_pb2.DataEndpoint(
        host=decode_pb2.HostIdentity(**asdict(endpoint.host)),
        lanes=endpoint.lanes,
        device_memory=endpoint.device_memory,
    )


def endpoint_from_proto(message: decode_pb2.DataEndpoint) -> DataEndpoint:
    """The endpoint of a ticket. Raises: RequestError when no worker could have it."""
    host = HostIdentity(**{field.name: getattr(message.host, field.name) for field in fields(HostIdentity)})
    lanes = tuple(message.lanes)
    longest = max(map(len, (host.hostname, host.boot_id, *lanes)))
    if len(lanes) > _MAX_LANES or longest > _MAX_TEXT:
        raise RequestError(
            f"Malformed transfer message: data_endpoint has {len(lanes)} lanes and texts of {longest} characters; "
            f"at most {_MAX_LANES} and {_MAX_TEXT}."
        )
    return DataEndpoint(host=host, lanes=lanes, device_memory=message.device_memory)
