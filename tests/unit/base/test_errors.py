"""The error table is total, and errors travel between processes unchanged."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pdserve.base import errors
from pdserve.base.wire import error_from_wire, error_to_wire
from pdserve.net import rpc
from pdserve.v1 import common_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from pdserve.v1 import decode_pb2 as pb


def _all_subclasses(cls: type[errors.PdserveError]) -> set[type[errors.PdserveError]]:
    return {cls}.union(*(_all_subclasses(child) for child in cls.__subclasses__()))


def test_every_error_class_has_codes() -> None:
    ours = {cls for cls in _all_subclasses(errors.PdserveError) if cls.__module__ == errors.__name__}
    assert ours == set(errors.error_classes().values())


def test_a_class_of_another_module_has_the_codes_of_its_base() -> None:
    class Local(errors.SetupError):
        pass

    assert errors.codes_of(Local("x")) == errors.codes_of(errors.SetupError("x"))


def test_grpc_codes_are_names_of_grpc() -> None:
    for cls in errors.error_classes().values():
        assert grpc.StatusCode[errors._TABLE[cls].grpc] is not None


def _example(cls: type[errors.PdserveError]) -> errors.PdserveError:
    if issubclass(cls, errors.Overloaded):
        return cls("full", retry_after_s=3)
    if issubclass(cls, errors.RequestError):
        return cls("wrong", param="max_tokens")
    return cls("it broke")


class _Raising(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    @rpc.method
    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:  # noqa: N802
        raise self.error

    @rpc.method
    async def Prefill(self, request: Any, context: Any) -> None:  # noqa: N802
        await context.write(prefill_pb2.PrefillResponse())
        raise self.error


async def _call(error: Exception) -> tuple[errors.PdserveError, errors.PdserveError]:
    servicer = _Raising(error)

    def register(server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)

    async with (
        rpc.serve_grpc(register, ["pdserve.v1.DecodeService"], host="127.0.0.1", port=0, flag="--grpc-port") as (
            address,
            _,
        ),
        rpc.open_channel(address) as channel,
    ):
        with pytest.raises(errors.PdserveError) as unary, rpc.mapped_rpc_errors("the decode worker"):
            await decode_pb2_grpc.DecodeServiceStub(channel).Commit(pb.CommitRequest())
        with pytest.raises(errors.PdserveError) as stream, rpc.mapped_rpc_errors("the prefill worker"):
            async for _ in prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest()):
                pass
    return unary.value, stream.value


@pytest.mark.parametrize("cls", errors.error_classes().values(), ids=lambda cls: cls.__name__)
async def test_an_error_raised_in_a_worker_arrives_as_the_same_error(cls: type[errors.PdserveError]) -> None:
    sent = _example(cls)
    over_a_stream = error_from_wire(common_pb2.Error.FromString(error_to_wire(sent).SerializeToString()))
    for received in (*await _call(sent), over_a_stream):
        assert type(received) is cls
        assert str(received) == str(sent)
        assert getattr(received, "param", None) == getattr(sent, "param", None)
        assert getattr(received, "retry_after_s", None) == getattr(sent, "retry_after_s", None)


async def test_an_unexpected_exception_reveals_no_details() -> None:
    """CVE-2026-22778. Fails where `_abort_unexpected` sends the text of the exception."""
    for received in await _call(ValueError("secret address 0x7f")):
        assert type(received) is errors.PdserveError
        assert "secret" not in str(received)


async def test_a_call_without_a_listener_is_a_lost_peer() -> None:
    async with rpc.open_channel("127.0.0.1:9") as channel:
        with pytest.raises(errors.PeerLost), rpc.mapped_rpc_errors("prefill worker p0"):
            await decode_pb2_grpc.DecodeServiceStub(channel).Commit(pb.CommitRequest())
