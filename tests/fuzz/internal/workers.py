"""Strangers at the ports of a prefill and a decode worker, which compute with a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvtransfer.handover.ticket import _mac_of, commit_from_proto
from pdserve.base.errors import RequestError
from pdserve.net.frames import framed
from pdserve.peers.seals import Purpose, Seals
from pdserve.peers.secret import parse_secret
from pdserve.v1 import decode_pb2, prefill_pb2
from pdserve.v1.common_pb2 import Sealed
from tests.fuzz.internal import inputs
from tests.fuzz.internal.inputs import TICKET, Sender
from tests.integration.services.local_cluster import LocalCluster, RouterRequest

#: Time that a stranger waits for an answer, before it leaves: nothing depends on it.
_PATIENCE_S = 0.05
#: Answers to strangers. UNKNOWN and INTERNAL are defects of the worker.
_EXPECTED = {
    "OK",
    "ABORTED",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
}
_FOREIGN = Seals(parse_secret("the-secret-of-another-cluster", where="fuzzing"))
_PREFILL = "/pdserve.v1.PrefillService/Prefill"
_COMMIT = "/pdserve.v1.DecodeService/Commit"
_INTRODUCE = "/pdserve.v1.DecodeService/Introduce"
_GET_DATA_ADDRESS = "/pdserve.v1.DecodeService/GetDataAddress"
#: Fields of tickets that are left as they are: the rest of the message decides what they can be.
_NOT_LIVE = ("first_block", "num_blocks", "other_first_blocks", "sealed", "guarded_addresses")
_PROBES = ("ReceiveProbe", "SendProbe", "CommitProbe")

M = TypeVar(
    "M",
    decode_pb2.DecodeStart,
    prefill_pb2.PrefillRequest,
    decode_pb2.CommitRequest,
    decode_pb2.IntroduceRequest,
    decode_pb2.GetDataAddressRequest,
)


class Workers:
    """A cluster without a secret and one with, and what both answer when all is well."""

    def __init__(self, opened: LocalCluster, sealed: LocalCluster) -> None:
        self._clusters = dict.fromkeys(Sender, sealed) | {Sender.OPEN: opened}
        self._opened = opened
        self._sealed = sealed
        self._reference: dict[int, list[int]] = {}

    async def learn(self) -> None:
        """Notes the tokens of the reference."""
        self._reference = await self._opened.local(inputs.PROMPT)

    async def start(self, data: bytes) -> str:
        """A request on a stream."""
        cluster, message = self._from(data, decode_pb2.DecodeStart, Purpose.START, "decode")
        if isinstance(message, bytes):
            return await self._stream(cluster, framed(b"\x0a" + _varint(len(message)) + message))
        request = decode_pb2.DecodeRequest(start=message)
        outcome = await self._stream(cluster, framed(request.SerializeToString()))
        assert cluster is self._opened or outcome in ("PeerRefused", "closed"), f"a stranger got {outcome}"
        return outcome

    async def stream(self, data: bytes) -> str:
        """Bytes on a stream."""
        return await self._stream(self._opened, data)

    async def commands(self, data: bytes) -> str:
        """Commands after a valid request."""
        cluster = self._opened
        is_local = bool(data and data[0] % 2)
        start = inputs._LOCAL if is_local else inputs._START
        request = decode_pb2.DecodeRequest(start=start)
        return await self._stream(cluster, framed(request.SerializeToString()) + data[1:])

    async def prompt(self, data: bytes) -> str:
        """A prompt, with a ticket that was just granted."""
        cluster, message = self._from(data, prefill_pb2.PrefillRequest, Purpose.PROMPT, "prefill")
        async with _granted(cluster) as ticket:
            if isinstance(message, prefill_pb2.PrefillRequest) and message.HasField("ticket"):
                _put_live(message.ticket, ticket)
            return await self._call(cluster, cluster.prefill_channel, _PREFILL, message)

    async def commit(self, data: bytes) -> str:
        """A commit for a ticket that was just granted, whose request goes on afterwards."""
        cluster, message = self._from(data, decode_pb2.CommitRequest, Purpose.COMMIT, "decode")
        async with _granted(cluster) as ticket:
            if isinstance(message, decode_pb2.CommitRequest):
                _put_live(message, ticket)
                if message.mac == inputs.SIGNED:
                    message.mac = _signed(message, ticket)
            return await self._call(cluster, cluster.decode_channel, _COMMIT, message)

    async def introduction(self, data: bytes) -> str:
        """An introduction, which the transport of these workers has no use for."""
        cluster, message = self._from(data, decode_pb2.IntroduceRequest, Purpose.INTRODUCTION, "decode")
        return await self._call(cluster, cluster.decode_channel, _INTRODUCE, message)

    async def data_address_request(self, data: bytes) -> str:
        """A question for the data address."""
        cluster, message = self._from(data, decode_pb2.GetDataAddressRequest, Purpose.ADDRESS_REQUEST, "decode")
        return await self._call(cluster, cluster.decode_channel, _GET_DATA_ADDRESS, message)

    async def probe(self, data: bytes) -> str:
        """A test transfer."""
        if not data:
            return "too short"
        cluster, name = self._opened, _PROBES[data[0] % len(_PROBES)]
        channel = cluster.prefill_channel if name == "SendProbe" else cluster.decode_channel
        return await self._call(cluster, channel, f"/pdserve.v1.DiagnosticsService/{name}", data[1:])

    async def check(self) -> None:
        """Both clusters compute the same as before, alone and with a hand-over, and hold nothing."""
        for cluster in (self._opened, self._sealed):
            await cluster.all_free()
            assert await cluster.local(inputs.PROMPT) == self._reference
            request = cluster.request(inputs.PROMPT)
            await request.start()
            await request.prefill(await request.ticket())
            assert await request.finish() == self._reference
            await cluster.all_free()
            for worker in (cluster.prefill, cluster.decode):
                transfers = worker.metrics.registry.get_sample_value(
                    "pdserve_kv_transfers_active", worker.metrics.labels()
                )
                assert not transfers, f"{transfers} transfers are left"

    def _from(self, data: bytes, kind: type[M], purpose: Purpose, tier: str) -> tuple[LocalCluster, M | bytes]:
        """The cluster that the input is for, and the message as its sender sends it; or bytes that are no message."""
        sender = Sender(data[0] % len(Sender)) if data else Sender.OPEN
        cluster, choice, body = self._clusters[sender], data[1] if len(data) > 1 else 0, data[2:]
        try:
            message = kind.FromString(body)
        except DecodeError:
            return cluster, body
        worker = cluster.decode if tier == "decode" else cluster.prefill
        if sender is Sender.FOREIGN:
            message = _FOREIGN.seal(purpose, worker.seal_name, message)
        elif sender is Sender.TAMPERED:
            message = cluster.seals.seal(purpose, worker.seal_name, message)
            _tamper(message.sealed, choice)
        return cluster, message

    async def _call(
        self, cluster: LocalCluster, channel: grpc.aio.Channel, method: str, message: Message | bytes
    ) -> str:
        """A call, and the status of its answer; a stranger does not wait for long."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        call = channel.unary_stream(method)(data)
        try:
            # A stranger to a cluster with a secret is refused: nothing makes it wait.
            async with asyncio.timeout(_PATIENCE_S if cluster is self._opened else None):
                async for _ in call:
                    pass
        except TimeoutError:
            call.cancel()
            return "left"
        except grpc.RpcError:
            pass
        code: str = (await call.code()).name
        assert code in _EXPECTED, f"{method}: {code} {await call.details()}"
        assert cluster is self._opened or code in ("UNAUTHENTICATED", "INVALID_ARGUMENT"), f"a stranger got {code}"
        return code

    async def _stream(self, cluster: LocalCluster, data: bytes) -> str:
        """Bytes on the stream address, and the name of the error that answers them."""
        host, port = cluster.decode_streams.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = b""
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    writer.write(data)
                    await writer.drain()
                    while received := await reader.read(65_536):
                        answer += received
                        if b"Error" in received or b"Refused" in received:
                            break
        finally:
            writer.close()
        return _name_of_error(answer)


@contextlib.asynccontextmanager
async def _granted(cluster: LocalCluster) -> Any:
    """A ticket for a request that the router has sent, and gives up afterwards."""
    await cluster.decode.calls.wait_idle()
    request: RouterRequest = cluster.request(inputs.PROMPT, inputs._REF.request_id)
    await request.start()
    try:
        yield await request.ticket()
    finally:
        request.cancel()
        await cluster.decode.calls.wait_idle()


def _put_live(message: Message, ticket: decode_pb2.Ticket) -> None:
    """Replaces the values of `TICKET` by those of the ticket."""
    for field in message.DESCRIPTOR.fields:
        if field.name not in TICKET.DESCRIPTOR.fields_by_name or field.name in _NOT_LIVE:
            continue
        present, template, live = (getattr(each, field.name) for each in (message, TICKET, ticket))
        if present != template:
            continue
        if isinstance(live, Message):
            present.CopyFrom(live)
        else:
            setattr(message, field.name, live)


def _signed(message: decode_pb2.CommitRequest, ticket: decode_pb2.Ticket) -> bytes:
    message.mac = bytes(32)
    with contextlib.suppress(RequestError):
        return _mac_of(ticket.key, commit_from_proto(message))
    return bytes(32)


def _tamper(sealed: Sealed, choice: int) -> None:
    """Changes one bit of a field."""
    name = ("payload", "nonce", "mac")[choice % 3]
    value = bytearray(getattr(sealed, name))
    value[choice % len(value)] ^= 1 << choice % 8
    setattr(sealed, name, bytes(value))


def _name_of_error(answer: bytes) -> str:
    """The error at the end of an answer; what else it has is told by its first message."""
    names = {
        b"PeerRefused",
        b"RequestError",
        b"StaleAttempt",
        b"InvalidTransition",
        b"NoFreeBlocks",
        b"TransferTimeout",
    }
    found = [name for name in names if name in answer]
    assert b"unexpectedly" not in answer, answer[-300:]
    return found[0].decode() if found else ("answered" if answer else "closed")


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes((*data, value))
