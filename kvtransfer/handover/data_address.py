"""The data address of a worker whose tickets have none, because nobody needed it: a sender that does asks for it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kvtransfer.handover.ticket import MAX_ADDRESS_BYTES, MAX_GUARDED
from kvtransfer.transport import GuardedTransport, Transport
from pdserve.base.errors import RequestError
from pdserve.v1 import decode_pb2

_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAddress:
    """Where a worker takes data, as in `Ticket`."""

    address: bytes
    guarded_addresses: tuple[str, ...] = ()


def data_address(transport: Transport, address: bytes) -> DataAddress:
    """Where a transport takes data. `address`: what its `listen` has returned."""
    if isinstance(transport, GuardedTransport) and transport.guard.is_active:
        return DataAddress(address=address, guarded_addresses=tuple(sorted(transport.guard.addresses)))
    return DataAddress(address=address)


def new_address_request() -> decode_pb2.GetDataAddressRequest:
    """The question as it travels, with a nonce for the answer."""
    return decode_pb2.GetDataAddressRequest(nonce=secrets.token_bytes(_NONCE_BYTES))


def require_nonce(message: decode_pb2.GetDataAddressRequest) -> None:
    """Raises: RequestError for a question that no worker asks."""
    if len(message.nonce) != _NONCE_BYTES:
        raise RequestError(f"Malformed question: the nonce has {len(message.nonce)} bytes, not {_NONCE_BYTES}.")


def data_address_to_proto(found: DataAddress) -> decode_pb2.GetDataAddressResponse:
    """The address as it travels."""
    return decode_pb2.GetDataAddressResponse(data_address=found.address, guarded_addresses=found.guarded_addresses)


def data_address_from_proto(message: decode_pb2.GetDataAddressResponse) -> DataAddress:
    """The address. Raises: RequestError when it is empty, or too much."""
    num_bytes, num_guarded = len(message.data_address), len(message.guarded_addresses)
    if not 0 < num_bytes <= MAX_ADDRESS_BYTES or num_guarded > MAX_GUARDED:
        raise RequestError(
            f"Malformed data address: {num_bytes} bytes with {num_guarded} guarded addresses, not 1 to "
            f"{MAX_ADDRESS_BYTES} bytes with at most {MAX_GUARDED}."
        )
    return DataAddress(address=message.data_address, guarded_addresses=tuple(message.guarded_addresses))
