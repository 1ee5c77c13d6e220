"""A worker's record as fields of a Redis hash. Who can write to Redis can write anything there: all of it is checked.

A record that is read has only values that its users can compute with. A record with any other value counts as
unreadable, which hides its worker and no other. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, TypeVar, cast, get_args

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdserve.base.addresses import is_host_port
from pdserve.base.errors import StoreError
from pdserve.base.ids import Epoch, RouterId, WorkerId
from pdserve.base.layout_wire import layout_from_record, layout_to_record
from pdserve.peers.workers import Tier, TransportReport, WorkerLoad, WorkerRecord

#: Maximum size of a record, with the names of its fields. Records of workers have about 2,000 bytes.
MAX_RECORD_BYTES = 65_536
#: The earlier name of a field, which other versions read and write.
_WHILE_DECODING = "prefill_tokens_per_s_beside_decoding"
_MAX_NUMBER = 2**63 - 1
_MAX_TEXT = 4096
_MAX_LENGTH = 2**31 - 1
#: Longest interval between keep-alives that a worker may announce.
_MAX_KEEP_ALIVE_S = 3600.0
_NUMBER = re.compile(rb"[0-9]{1,19}")

T = TypeVar("T")
_Model = TypeVar("_Model", bound=BaseModel)
_Count = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
_Rate = Annotated[float, AllowInfNan(False), Field(ge=0)]
_Text = Annotated[str, Field(max_length=_MAX_TEXT)]


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Load(_Stored):
    running: _Count = 0
    waiting: _Count = 0
    queued_tokens: _Count = 0
    free_blocks: _Count = 0
    prefill_tokens_per_s: _Rate | None = None
    prefill_tokens_per_s_while_decoding: _Rate | None = Field(None, alias="prefill_tokens_per_s_beside_decoding")


class _Transport(_Stored):
    paths: dict[_Text, _Count] = {}
    degraded: _Text | None = None


_QUEUED_BY_ROUTER: TypeAdapter[dict[str, int] | None] = TypeAdapter(
    Annotated[dict[_Text, _Count] | None, Field(strict=True)]
)
_KEEP_ALIVE_S: TypeAdapter[float | None] = TypeAdapter(
    Annotated[Annotated[float, AllowInfNan(False), Field(gt=0, le=_MAX_KEEP_ALIVE_S)] | None, Field(strict=True)]
)


def record_to_fields(record: WorkerRecord) -> dict[str, str]:
    """The record as fields of a Redis hash, whose key has the worker's id.

    A later version adds fields, which older readers ignore.
    """
    load = asdict(record.load)
    load[_WHILE_DECODING] = load.pop("prefill_tokens_per_s_while_decoding")
    queued_by_router = load.pop("queued_by_router")
    return {
        "epoch": str(record.epoch),
        "tier": record.tier,
        "grpc_address": record.grpc_address,
        "http_address": record.http_address,
        "stream_address": record.stream_address,
        "model": record.model,
        "layout": json.dumps(layout_to_record(record.layout)),
        "max_num_seqs": str(record.max_num_seqs),
        "max_model_len": str(record.max_model_len),
        "total_blocks": str(record.total_blocks),
        "pid": str(record.pid),
        "ready": str(int(record.ready)),
        "keep_alive_s": json.dumps(record.keep_alive_s),
        "numerics_class": record.numerics_class,
        "reads_grammars": str(int(record.reads_grammars)),
        "asks_for_addresses": str(int(record.asks_for_addresses)),
        "sampling_version": str(record.sampling_version),
        "home_tier": record.home_tier or "",
        "load": json.dumps(load),
        "queued_by_router": json.dumps(queued_by_router),
        "transport": json.dumps(asdict(record.transport)),
    }


def record_from_fields(worker_id: WorkerId, found: Mapping[str, bytes]) -> WorkerRecord:
    """The record from its fields. Fields that this version does not know are ignored.

    Raises `StoreError` when the fields are not those of a worker.
    """
    try:
        return _record(worker_id, found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _unreadable(worker_id, f"{error.title} {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (KeyError, ValueError) as error:
        raise _unreadable(worker_id, repr(error)) from error


def beat_from_fields(worker_id: WorkerId, found: Mapping[str, bytes]) -> int:
    """The count of heartbeats of a record. Raises `StoreError` when it has none."""
    beat = found.get("beat", b"")
    if _NUMBER.fullmatch(beat) is None:
        raise _unreadable(worker_id, "it has no heartbeat count")
    return int(beat)


def worker_id_from(name: bytes) -> WorkerId:
    """The id of a worker as Redis has it. Raises `StoreError` for what cannot be one."""
    try:
        text = name.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(WorkerId(repr(name[:100])), "its id is no text") from error
    if not text.isprintable() or not 0 < len(text) <= _MAX_TEXT:
        raise _unreadable(WorkerId(repr(text[:100])), "its id is not a printable text")
    return WorkerId(text)


def require_small(worker_id: WorkerId, found: Mapping[str, bytes]) -> None:
    """Raises `StoreError` for a record so large that reading it would hold up a router."""
    num_bytes = sum(len(name) + len(value) for name, value in found.items())
    if num_bytes > MAX_RECORD_BYTES:
        raise _unreadable(worker_id, f"it has {num_bytes} bytes, more than {MAX_RECORD_BYTES}")


def _record(worker_id: WorkerId, found: Mapping[str, bytes]) -> WorkerRecord:
    tier = found["tier"].decode()
    if tier not in get_args(Tier):
        raise ValueError(f"{tier!r} is not a tier")
    return WorkerRecord(
        worker_id=worker_id,
        epoch=Epoch(_number(found, "epoch", least=1)),
        tier=cast(Tier, tier),
        grpc_address=_address(found, "grpc_address"),
        http_address=_address(found, "http_address"),
        # Only decode workers have a stream address.
        stream_address=_address(found, "stream_address") if found["stream_address"] or tier == "decode" else "",
        model=found["model"].decode(),
        layout=layout_from_record(found["layout"]),
        max_num_seqs=_number(found, "max_num_seqs", least=1, greatest=_MAX_LENGTH),
        max_model_len=_number(found, "max_model_len", least=1, greatest=_MAX_LENGTH),
        total_blocks=_number(found, "total_blocks"),
        pid=_number(found, "pid"),
        ready=found["ready"] == b"1",
        keep_alive_s=_KEEP_ALIVE_S.validate_json(found.get("keep_alive_s", b"null")),
        numerics_class=_class(found),
        reads_grammars=found.get("reads_grammars") == b"1",
        asks_for_addresses=found.get("asks_for_addresses") == b"1",
        sampling_version=_number({"sampling_version": b"0", **found}, "sampling_version"),
        home_tier=_home_tier(found),
        load=_load(found),
        transport=TransportReport(**_parsed(_Transport, found.get("transport", b"{}")).model_dump()),
    )


def _class(found: Mapping[str, bytes]) -> str:
    text = found.get("numerics_class", b"").decode()
    if len(text) > _MAX_TEXT or not text.isprintable():
        raise ValueError("its numerics class is not a short printable text")
    return text


def _home_tier(found: Mapping[str, bytes]) -> Tier | None:
    tier = found.get("home_tier", b"").decode()
    if tier not in ("", *get_args(Tier)):
        raise ValueError(f"home_tier is {tier[:40]!r}, not a tier")
    return cast(Tier, tier) if tier else None


def _load(found: Mapping[str, bytes]) -> WorkerLoad:
    stored = _parsed(_Load, found["load"])
    queued = _QUEUED_BY_ROUTER.validate_json(found.get("queued_by_router", b"null"))
    return WorkerLoad(
        running=stored.running,
        waiting=stored.waiting,
        queued_tokens=stored.queued_tokens,
        queued_by_router=None if queued is None else {RouterId(name): tokens for name, tokens in queued.items()},
        free_blocks=stored.free_blocks,
        # Rates are rounded: 0 is slower than any prompt is computed, and nothing can be divided by it.
        prefill_tokens_per_s=stored.prefill_tokens_per_s or None,
        prefill_tokens_per_s_while_decoding=stored.prefill_tokens_per_s_while_decoding or None,
    )


def _parsed(model: type[_Model], stored: bytes) -> _Model:
    return model.model_validate_json(stored)


def _number(found: Mapping[str, bytes], name: str, *, least: int = 0, greatest: int = _MAX_NUMBER) -> int:
    text = found[name]
    if _NUMBER.fullmatch(text) is None or not least <= int(text) <= greatest:
        raise ValueError(f"{name} is {text[:40]!r}, not a number from {least} to {greatest}")
    return int(text)


def _address(found: Mapping[str, bytes], name: str) -> str:
    text = found[name].decode()
    if not is_host_port(text):
        raise ValueError(f"{name} is {text[:100]!r}, not HOST:PORT")
    return text


def _unreadable(worker_id: WorkerId, reason: str) -> StoreError:
    return StoreError(f"The record of worker {worker_id} in Redis cannot be read: {reason}.")
