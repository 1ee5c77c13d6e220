"""A transport gets the right device, and is guarded where peers can prove who they are."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import cast

import pytest

from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.errors import SetupError
from pdserve.peers.peer_tls import PeerTls
from pdserve.peers.seals import Seals
from pdserve.peers.secret import parse_secret
from pdserve.worker.config import WorkerConfig
from pdserve.worker.serve import opened_transport as module
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.opened_transport import _keeps_strangers_out, opened_transport

SECRET = "the-secret-of-this-cluster"


@pytest.mark.parametrize(("memory", "device"), [("device", "cuda:1"), ("host", None)])
async def test_a_transport_gets_the_gpu_that_holds_its_buffers(
    monkeypatch: pytest.MonkeyPatch, memory: str, device: str | None
) -> None:
    devices: list[str | None] = []

    def open_transport(name: str, *, device: str | None, **_: object) -> InprocTransport:
        devices.append(device)
        return InprocTransport()

    monkeypatch.setattr(module, "open_transport", open_transport)
    monkeypatch.setattr(module, "bind_thread", lambda config: None)
    config = WorkerConfig(model="m", redis_url="", device="cuda:1", transport="nccl", handover_memory=memory)
    metrics = WorkerMetrics(tier="prefill", model_name="m")
    async with opened_transport(config, Seals(), None, metrics):
        assert devices == [device]


@pytest.mark.parametrize(
    ("words", "has_tls", "guard_transport", "guarded"),
    [
        (None, False, "auto", False),
        (None, True, "auto", True),
        (SECRET, False, "auto", True),
        (SECRET, False, "require", True),
        (SECRET, False, "off", False),
        # On the way to a secret, workers without it are let in.
        (f"{SECRET} open", False, "auto", False),
        (f"{SECRET} open", True, "auto", True),
    ],
)
def test_strangers_are_kept_out_where_peers_can_prove_who_they_are(
    monkeypatch: pytest.MonkeyPatch, words: str | None, has_tls: bool, guard_transport: str, guarded: bool
) -> None:
    monkeypatch.setattr(module, "filter_refusal", lambda: 0)
    config = WorkerConfig(model="m", redis_url="", guard_transport=guard_transport)
    seals = Seals(None if words is None else parse_secret(words, where="test"))
    tls = cast(PeerTls, object()) if has_tls else None
    assert _keeps_strangers_out(config, seals, tls) is guarded


def test_where_the_kernel_refuses_filters_a_worker_starts_and_says_so_unless_the_guard_is_required(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails when such a worker does not start: no user but root could have a cluster there, or is silent about it."""
    monkeypatch.setattr(module, "filter_refusal", lambda: errno.EPERM)
    seals = Seals(parse_secret(SECRET, where="test"))
    config = WorkerConfig(model="m", redis_url="")
    assert not _keeps_strangers_out(config, seals, None)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["transport_not_guarded"]
    with pytest.raises(SetupError, match=r"Operation not permitted.*CAP_NET_ADMIN"):
        _keeps_strangers_out(replace(config, guard_transport="require"), seals, None)
    caplog.clear()
    assert not _keeps_strangers_out(replace(config, transport="nccl"), seals, None)
    assert not caplog.records
