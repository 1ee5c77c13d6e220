"""The wire formats of facts about machines and workers."""

from __future__ import annotations

from dataclasses import asdict, fields

from pdserve.base.layout_wire import layout_from_proto, layout_to_proto
from pdserve.observe.facts.cluster import RedisFacts, WorkerFacts
from pdserve.observe.facts.machine import Folder, MachineFacts
from pdserve.peers.host_identity import HostIdentity
from pdserve.v1 import decode_pb2
from pdserve.v1 import diagnostics_pb2 as pb

#: Fields of `MachineFacts` that are not copied as they are.
_CONVERTED = ("host", "folders", "cuda_visible_devices", "ucx_variables", "packages", "cpu_features", "rdma_devices")


def host_to_proto(host: HostIdentity) -> decode_pb2.HostIdentity:
    """The identity as it travels."""
    return decode_pb2.HostIdentity(**asdict(host))


def host_from_proto(message: decode_pb2.HostIdentity) -> HostIdentity:
    """The identity as it was sent."""
    return HostIdentity(**{field.name: getattr(message, field.name) for field in fields(HostIdentity)})


def worker_to_proto(facts: WorkerFacts) -> pb.DescribeResponse:
    """A worker's facts as they travel."""
    return pb.DescribeResponse(
        worker_id=facts.worker_id,
        tier=facts.tier,
        layout=layout_to_proto(facts.layout),
        transport=facts.transport,
        device=facts.device,
        kernels=facts.kernels,
        instruction_set=facts.instruction_set,
        unix_time_s=facts.unix_time_s,
        machine=_machine_to_proto(facts.machine),
        redis=pb.RedisFacts(**asdict(facts.redis)),
    )


def worker_from_proto(message: pb.DescribeResponse) -> WorkerFacts:
    """A worker's facts as they were sent. Raises: RequestError for a KV layout that no worker could have."""
    return WorkerFacts(
        worker_id=message.worker_id,
        tier=message.tier,
        layout=layout_from_proto(message.layout),
        transport=message.transport,
        device=message.device,
        kernels=message.kernels,
        instruction_set=message.instruction_set,
        unix_time_s=message.unix_time_s,
        machine=_machine_from_proto(message.machine),
        redis=RedisFacts(**{field.name: getattr(message.redis, field.name) for field in fields(RedisFacts)}),
    )


def _machine_to_proto(facts: MachineFacts) -> pb.MachineFacts:
    plain = {field.name: getattr(facts, field.name) for field in fields(facts) if field.name not in _CONVERTED}
    return pb.MachineFacts(
        host=host_to_proto(facts.host),
        cpu_features=facts.cpu_features,
        folders=[pb.Folder(**asdict(folder)) for folder in facts.folders],
        cuda_visible_devices=facts.cuda_visible_devices,
        rdma_devices=facts.rdma_devices,
        ucx_variables=facts.ucx_variables,
        packages=facts.packages,
        **plain,
    )


def _machine_from_proto(message: pb.MachineFacts) -> MachineFacts:
    plain = {field.name: getattr(message, field.name) for field in fields(MachineFacts) if field.name not in _CONVERTED}
    has_devices = message.HasField("cuda_visible_devices")
    return MachineFacts(
        host=host_from_proto(message.host),
        cpu_features=tuple(message.cpu_features),
        folders=tuple(Folder(path=folder.path, free_bytes=folder.free_bytes) for folder in message.folders),
        cuda_visible_devices=message.cuda_visible_devices if has_devices else None,
        rdma_devices=tuple(message.rdma_devices),
        ucx_variables=dict(message.ucx_variables),
        packages=dict(message.packages),
        **plain,
    )
