"""Who connects to whom, read from the code: gRPC stubs, token streams, and transfers of KV."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The code that runs in a role: what the service has, and what it shares. Commands run in containers of routers.
CODE = {
    "router_svc": ("router_svc", "pdserve/cli"),
    "prefill_svc": ("prefill_svc", "pdserve/worker"),
    "decode_svc": ("decode_svc", "pdserve/worker"),
}
#: Calls that open a connection to a process of the cluster, by the module that may make them.
OPENERS = {
    "pdserve/net/rpc.py": {"insecure_channel", "secure_channel"},
    "pdserve/net/streams.py": {"create_connection"},
    "kvtransfer/transport/ucx.py": {"create_from_worker_address"},
    "kvtransfer/transport/torch_distributed/transport.py": {"create_connection"},
    "kvtransfer/transport/torch_distributed/pair_link.py": {"TCPStore"},
    # The far end of a socket pair that the process made itself.
    "pdserve/worker/ranks/processes.py": {"open_connection"},
}
_PACKAGES = (
    *("router_svc", "prefill_svc", "decode_svc", "worker_svc", "kvtransfer"),
    *(f"pdserve/{name}" for name in ("base", "redis", "peers", "observe", "net", "worker")),
)


@cache
def _called(path: Path) -> frozenset[str]:
    """Last names of what a module calls: `f` for `a.b.f(...)`."""
    functions = (node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    return frozenset(ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in functions)


def _called_in(role: str) -> frozenset[str]:
    paths = (path for package in CODE[role] for path in (ROOT / package).rglob("*.py"))
    return frozenset().union(*map(_called, paths))


def openers() -> dict[str, set[str]]:
    """As `OPENERS`, read from the code of services."""
    names = frozenset().union(*OPENERS.values())
    paths = (path for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): set(found) for path in paths if (found := _called(path) & names)}


@cache
def connections() -> frozenset[tuple[str, str, str]]:
    """The role that connects, the role that listens, and what it listens for: `grpc`, `stream` or `kv`."""
    return frozenset(_connections())


def _connections() -> Iterator[tuple[str, str, str]]:
    for client in CODE:
        for server in CODE:
            calls, offers = _called_in(client), _called_in(server)
            stubs = {name.removesuffix("Stub") for name in calls if name.endswith("ServiceStub")}
            if any(f"add_{name}Servicer_to_server" in offers for name in stubs):
                yield client, server, "grpc"
            if "StreamPool" in calls and "serve_streams" in offers:
                yield client, server, "stream"
            if "Sender" in calls and "Receiver" in offers:
                # UCX may connect from either side.
                yield client, server, "kv"
                yield server, client, "kv"
