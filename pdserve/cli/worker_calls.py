"""How commands call workers: what names the cluster and its secret, and one sealed call to a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pdserve.base.config import option
from pdserve.base.ids import Epoch, WorkerId
from pdserve.cli.status import WorkerStatus
from pdserve.cli.up_secret import secret_of_run
from pdserve.net.rpc import mapped_rpc_errors, open_channel
from pdserve.peers.peer_tls import peer_tls
from pdserve.peers.seals import Message, Purpose, Seals, receiver_name
from pdserve.peers.secret import read_secret
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc

#: Time that a worker has to answer.
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCallOptions:
    """What a command needs to call workers: the key for the list of them, and what makes it one of the cluster."""

    api_key: str | None = option(None, help="API key; default: the variable PDSERVE_API_KEY", metavar="KEY")
    cluster_secret_file: str | None = option(
        None,
        help="file with the cluster's secret; default: the variable PDSERVE_CLUSTER_SECRET, or that of the running "
        "`pdserve up`",
        metavar="FILE",
    )
    peer_ssl_certfile: str | None = option(None, help="where workers speak TLS: own certificate", metavar="FILE")
    peer_ssl_keyfile: str | None = option(None, help="the certificate's private key", metavar="FILE")
    peer_ssl_ca_certs: str | None = option(None, help="certificates of the workers' CAs", metavar="FILE")
    peer_ssl_server_name: str | None = option(
        None, help="name in the certificates of all workers; default: the address of each", metavar="NAME"
    )

    def seals(self, base_url: str) -> Seals:
        """Seals with the cluster's secret. Raises `SetupError` when the file cannot be used."""
        return Seals(read_secret(self.cluster_secret_file) or secret_of_run(base_url))


class WorkerCalls:
    """Calls to the diagnostics service of one worker, each sealed for it."""

    def __init__(self, stub: pb_grpc.DiagnosticsServiceStub, worker: WorkerStatus, seals: Seals) -> None:
        self.stub = stub
        self._name = f"worker {worker.worker_id}"
        self._receiver = receiver_name(WorkerId(worker.worker_id), Epoch(worker.epoch))
        self._seals = seals

    async def send(self, method: Any, purpose: Purpose, request: Message) -> Any:
        """The answer to one call of `method`, which is one of `stub`. Raises `PdserveError`.

        The request is sealed anew each time, since a worker opens a sealed message once.
        """
        with mapped_rpc_errors(self._name):
            return await method(self._seals.seal(purpose, self._receiver, request), timeout=_TIMEOUT_S)


@asynccontextmanager
async def worker_calls(worker: WorkerStatus, options: WorkerCallOptions, base_url: str) -> AsyncIterator[WorkerCalls]:
    """Calls to a worker of the cluster whose router is at `base_url`. Raises `SetupError` for unusable files."""
    async with open_channel(worker.grpc_address, peer_tls(options)) as channel:
        yield WorkerCalls(pb_grpc.DiagnosticsServiceStub(channel), worker, options.seals(base_url))
