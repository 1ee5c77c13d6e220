"""Facts are read from the machine and survive the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.observe.facts import machine as facts_module
from pdserve.observe.facts.machine import machine_facts
from pdserve.observe.facts.wire import worker_from_proto, worker_to_proto
from pdserve.peers.host_identity import own_host_identity
from pdserve.v1 import diagnostics_pb2 as pb
from tests.support.machine import worker_facts


def test_the_facts_of_this_machine_are_plausible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    facts = machine_facts([tmp_path / "not" / "there"])
    assert facts.host == own_host_identity()
    assert 0 < facts.available_memory_bytes <= facts.total_memory_bytes
    assert facts.num_cores > 0
    assert facts.open_files > 0
    assert facts.ucx_variables["UCX_TLS"] == "tcp"
    assert "torch" in facts.packages
    missing, temporary = facts.folders
    assert missing.path == str(tmp_path / "not" / "there")
    assert missing.free_bytes > 0
    assert temporary.free_bytes > 0


def test_processor_features_come_from_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 avx512f sse\n")
    assert facts_module._cpu_features(tmp_path / "cpuinfo") == ("avx2", "avx512f")
    assert facts_module._cpu_features(tmp_path / "missing") == ()


@pytest.mark.parametrize("devices", [None, "", "0,1"])
def test_a_workers_facts_survive_the_wire(devices: str | None) -> None:
    facts = worker_facts("decode-0", "decode")
    facts = replace(
        facts,
        machine=replace(
            facts.machine, cuda_visible_devices=devices, memlock_bytes=-1, ucx_variables={"UCX_TLS": "tcp"}
        ),
    )
    wire = worker_to_proto(facts).SerializeToString()
    assert worker_from_proto(pb.DescribeResponse.FromString(wire)) == facts


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    identity = own_host_identity(tmp_path)
    assert (identity.boot_id, identity.capabilities, identity.pid_namespace) == ("", 0, 0)
    assert not identity.shares_host_with(identity)
