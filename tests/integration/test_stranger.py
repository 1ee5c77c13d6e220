"""A process that reaches every port of a cluster and lacks its secret: it reads no prompt, changes no answer, stops
nothing.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvtransfer.handover.data_address import new_address_request
from kvtransfer.handover.introduction import Introduction, introduction_to_proto
from kvtransfer.transport.own_sockets import Connection
from kvtransfer.transport.ucx_address import pack_address
from pdserve.base.errors import PeerRefused
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.sampling import SamplingParams
from pdserve.base.wire import error_from_wire, sampling_to_wire
from pdserve.cli.doctor import DoctorConfig, diagnose
from pdserve.cli.status import WorkerStatus
from pdserve.net.rpc import mapped_rpc_errors, open_channel
from pdserve.net.streams import open_stream
from pdserve.peers.seals import Purpose, Seals, receiver_name
from pdserve.peers.secret import new_secret, parse_secret
from pdserve.v1 import common_pb2, decode_pb2, decode_pb2_grpc, diagnostics_pb2, diagnostics_pb2_grpc, prefill_pb2
from pdserve.v1 import prefill_pb2_grpc as prefill_grpc
from tests.support.cluster import MODEL, Cluster
from tests.support.exposed import PROMPT, stream_address, ucx_ports

Attempt = Callable[[], Coroutine[Any, Any, None]]

TIMEOUT_S = 20.0
#: UCX aborts the process that connects to this address.
CRASHING = pack_address(b"\xff" * 64)
#: Somebody who has another cluster's secret.
FOREIGN = Seals(parse_secret(new_secret(), where="the test"))


def _start(request_id: str) -> decode_pb2.DecodeStart:
    """A request whose blocks the stranger would send."""
    return decode_pb2.DecodeStart(
        ref=common_pb2.RequestRef(request_id=request_id, attempt=2**32 - 1, router_id="stranger"),
        prompt_token_ids=list(range(100, 400)),
        sampling=sampling_to_wire(SamplingParams(temperature=0.0, max_tokens=4, seed=1)),
    )


def _ticket() -> decode_pb2.Ticket:
    layout = decode_pb2.KvLayout(model="m", dtype="float32", block_size=16, num_layers=1, num_kv_heads=1, head_dim=1)
    return decode_pb2.Ticket(
        transfer_id=bytes(16),
        attempt=1,
        worker_id="decode-0",
        epoch=1,
        grpc_address="127.0.0.1:9",
        transport="ucx",
        data_address=CRASHING,
        num_blocks=1,
        layout=layout,
        lease_s=5.0,
        key=bytes(32),
        layer_groups=1,
        bundle_blocks=1,
        digest="xxh3",
    )


async def _open_request(address: str, start: decode_pb2.DecodeStart) -> None:
    stream = await open_stream(address, decode_pb2.DecodeResponse.FromString)
    try:
        await stream.write(decode_pb2.DecodeRequest(start=start))
        answer = await stream.read(TIMEOUT_S)
        assert answer is not None
        assert answer.WhichOneof("event") == "failed", answer
        raise error_from_wire(answer.failed)
    finally:
        stream.close()


async def _prefill(address: str, request: prefill_pb2.PrefillRequest) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the prefill worker"):
            async for event in prefill_grpc.PrefillServiceStub(channel).Prefill(request, timeout=TIMEOUT_S):
                raise AssertionError(f"a stranger got {event}")


async def _commit(address: str, commit: decode_pb2.CommitRequest) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the decode worker"):
            await decode_pb2_grpc.DecodeServiceStub(channel).Commit(commit, timeout=TIMEOUT_S)


async def _introduce(address: str, introduction: decode_pb2.IntroduceRequest) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the decode worker"):
            await decode_pb2_grpc.DecodeServiceStub(channel).Introduce(introduction, timeout=TIMEOUT_S)


async def _ask_for_address(address: str, question: decode_pb2.GetDataAddressRequest) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the decode worker"):
            await decode_pb2_grpc.DecodeServiceStub(channel).GetDataAddress(question, timeout=TIMEOUT_S)


async def _probe(address: str) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the prefill worker"):
            stub = diagnostics_pb2_grpc.DiagnosticsServiceStub(channel)
            await stub.SendProbe(diagnostics_pb2.SendProbeRequest(ticket=_ticket(), request_id="r"), timeout=TIMEOUT_S)


async def _describe(address: str, request: diagnostics_pb2.DescribeRequest) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the worker"):
            await diagnostics_pb2_grpc.DiagnosticsServiceStub(channel).Describe(request, timeout=TIMEOUT_S)


async def _receive(address: str) -> None:
    async with open_channel(address) as channel:
        with mapped_rpc_errors("the worker"):
            stub = diagnostics_pb2_grpc.DiagnosticsServiceStub(channel)
            async for event in stub.ReceiveProbe(diagnostics_pb2.ReceiveProbeRequest(num_bytes=1), timeout=TIMEOUT_S):
                raise AssertionError(f"a stranger got {event}")


def _attempts(prefill: WorkerStatus, decode: WorkerStatus, streams: str) -> dict[str, Attempt]:
    """Every message that a worker takes, without a MAC and with that of another cluster."""
    at_decode = receiver_name(WorkerId(decode.worker_id), Epoch(decode.epoch))
    at_prefill = receiver_name(WorkerId(prefill.worker_id), Epoch(prefill.epoch))
    prompt = prefill_pb2.PrefillRequest(ref=_start("p").ref, prompt_token_ids=[1, 2, 3], ticket=_ticket())
    prompt.sampling.CopyFrom(_start("p").sampling)
    commit = decode_pb2.CommitRequest(
        ref=_start("c").ref, transfer_id=bytes(16), epoch=decode.epoch, first_tokens=[1], mac=bytes(32)
    )
    facts = diagnostics_pb2.DescribeRequest()
    introduction = introduction_to_proto(Introduction(own=(Connection("127.0.0.1:9", "127.0.0.1:10"),)))
    address = new_address_request()
    foreign_introduction = FOREIGN.seal(Purpose.INTRODUCTION, at_decode, introduction)
    return {
        "start": lambda: _open_request(streams, _start("s")),
        "foreign start": lambda: _open_request(streams, FOREIGN.seal(Purpose.START, at_decode, _start("s"))),
        "prompt": lambda: _prefill(prefill.grpc_address, prompt),
        "foreign prompt": lambda: _prefill(prefill.grpc_address, FOREIGN.seal(Purpose.PROMPT, at_prefill, prompt)),
        "commit": lambda: _commit(decode.grpc_address, commit),
        "foreign commit": lambda: _commit(decode.grpc_address, FOREIGN.seal(Purpose.COMMIT, at_decode, commit)),
        "introduction": lambda: _introduce(decode.grpc_address, introduction),
        "foreign introduction": lambda: _introduce(decode.grpc_address, foreign_introduction),
        "data address": lambda: _ask_for_address(decode.grpc_address, address),
        "foreign data address": lambda: _ask_for_address(
            decode.grpc_address, FOREIGN.seal(Purpose.ADDRESS_REQUEST, at_decode, address)
        ),
        "facts": lambda: _describe(decode.grpc_address, facts),
        "foreign facts": lambda: _describe(decode.grpc_address, FOREIGN.seal(Purpose.DESCRIBE, at_decode, facts)),
        "test transfer into": lambda: _receive(decode.grpc_address),
        "test transfer": lambda: _probe(prefill.grpc_address),
    }


def _answer(cluster: Cluster) -> str:
    with cluster.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    return answer.choices[0].text


def test_a_stranger_reads_no_prompt_changes_no_answer_and_stops_nothing(cluster: Cluster) -> None:
    before, expected = {name: each.pid for name, each in cluster.processes().items()}, _answer(cluster)
    [prefill], [decode] = cluster.workers("prefill"), cluster.workers("decode")
    streams = stream_address(cluster, decode)
    for name, attempt in _attempts(prefill, decode, streams).items():
        with pytest.raises(PeerRefused):
            asyncio.run(attempt())
            raise AssertionError(f"{name} was accepted")
    assert cluster.worker_metric("decode", "pdserve_peer_messages_refused_total") >= 6
    assert cluster.worker_metric("prefill", "pdserve_peer_messages_refused_total") >= 3
    for address in (prefill.grpc_address, decode.grpc_address, prefill.http_address, decode.http_address, streams):
        _send_garbage(address)
    for address in (prefill.http_address, decode.http_address):
        _try_to_change(address)
    assert _answer(cluster) == expected
    assert {name: each.pid for name, each in cluster.processes().items()} == before


def _send_garbage(address: str) -> None:
    host, _, port = address.rpartition(":")
    for data in (
        b"\x00" * 64,
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x01" * 40,
    ):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(data)


def _try_to_change(address: str) -> None:
    """The HTTP port of a worker only reports: nothing is posted to it, and no path has prompts."""
    for path in ("/livez", "/metrics", "/drain", "/shutdown", "/v1/completions"):
        request = urllib.request.Request(f"http://{address}{path}", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=TIMEOUT_S)
        with refused.value as answer:
            assert answer.code in (404, 405)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        assert b"Germany" not in answer.read()


def test_workers_of_one_host_open_no_port_of_ucx(cluster: Cluster) -> None:
    """What is not open needs no guard. They have exchanged blocks all the same."""
    assert _answer(cluster)
    assert cluster.worker_metric("prefill", "pdserve_transport_path_info", expected="local", actual="local") == 1
    assert ucx_ports(cluster) == {"prefill-0": set(), "decode-0": set()}


def test_the_secret_of_a_run_is_seen_in_no_process_arguments_and_no_log(cluster: Cluster) -> None:
    processes = cluster.processes()
    secrets = {processes[name].environ().get("PDSERVE_CLUSTER_SECRET") for name in processes if name != "redis"}
    [secret] = secrets
    assert secret
    assert not any(secret in word for process in processes.values() for word in process.cmdline())
    assert not any(secret in log.read_text() for log in cluster.log_dir.glob("*.log"))


def test_doctor_of_the_same_user_finds_the_secret_of_the_run(cluster: Cluster) -> None:
    """Otherwise every worker would refuse it."""
    _, facts = asyncio.run(diagnose(DoctorConfig(base_url=cluster.base_url, max_pairs=0)))
    assert facts is not None
    assert {worker.tier for worker in facts.workers if worker.facts is not None} == {"prefill", "decode"}
