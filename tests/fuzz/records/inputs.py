"""Inputs of this area: commands of Redis as JSON, a list of lists, where each character of an argument is a byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

from pdserve.peers.record_fields import record_to_fields
from pdserve.peers.workers import WorkerLoad
from router_svc.records.request_state import RequestProgress, RequestState
from router_svc.records.request_store import StoredRequest, _to_fields
from tests.fuzz.files.mutations import damaged_bytes, damaged_json
from tests.support.records import worker_record
from tests.support.tiny_model import NAME

Commands = list[list[str]]
#: The worker of damaged records, and the workers of the cluster.
STRANGER, WORKERS = "stranger", ("prefill-0", "decode-0")
#: The request of damaged state, also as a client asks for it.
REQUEST = "gen-fuzzed"
#: The day of damaged usage, when the router also has some.
USAGE_DAY = "2026-11-23"
_SHAPES: tuple[Callable[[str], Commands], ...] = (
    lambda key: [["SET", key, "x"]],
    lambda key: [["RPUSH", key, "x", "\xff\xfe", ""]],
    lambda key: [["SADD", key, "x", "\xff\xfe", "a" * 16, "b" * 20_000]],
    lambda key: [["HSET", key, "x", "\xff\xfe", "epoch", "\xff"]],
    lambda key: [["ZADD", key, "1", "x"]],
    lambda key: [["XADD", key, "*", "worker", "\xff"]],
)
_NUMBERS = ("0", "-1", "1", "01", "1.5", "9" * 19, "9" * 25, "9" * 5000, "1e308", "nan", "inf", "", " 1", "\xb2", "x")
_BYTES = ("", "\xff\xfe\xfd", "\x00", "\x1b[2J\n", "a" * 300, "a" * 100_000, "null", "[" * 900, "[" * 100_000, "{}")


def encode(commands: Commands) -> bytes:
    """The input with these commands."""
    return json.dumps(commands).encode()


def decode(data: bytes) -> list[list[bytes]] | None:
    """The commands of an input; None for damaged JSON."""
    try:
        commands = json.loads(data)
        decoded = [[argument.encode("latin-1") for argument in command] for command in commands]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return decoded if all(len(command) >= 2 and command[1].startswith(b"pd:") for command in decoded) else None


def other_shape(random: Random, *keys: str) -> Commands:
    """Something else under one of the keys."""
    key = random.choice(keys)
    return [["DEL", key], *random.choice(_SHAPES)(key)]


def worker(random: Random) -> bytes:
    """The record of a worker, ready and without load, so that requests go to it."""
    name = random.choice((STRANGER, STRANGER, *WORKERS, "\xff\xfe", "", "a\nb", "x" * 5000))
    key = f"pd:worker:{name}"
    if random.random() < 0.1:
        return encode([*other_shape(random, key, "pd:workers", "pd:workers-mark"), ["SADD", "pd:workers", name]])
    record = worker_record(name, tier=random.choice(("prefill", "decode")), free_blocks=10_000)
    load = WorkerLoad(free_blocks=10_000, prefill_tokens_per_s=10.0, queued_by_router={})
    fields = {**_fields(record_to_fields(record)), "model": NAME, "beat": "7", "load": json.dumps(_load(load))}
    for _ in range(random.randint(0, 3)):
        _damage(fields, random)
    return encode([["HSET", key, *_flat(fields)], ["PEXPIRE", key, "5000"], ["SADD", "pd:workers", name]])


def request(random: Random) -> bytes:
    """The state of a request, its decision record, and the list of requests."""
    key = f"pd:req:{REQUEST}"
    if random.random() < 0.2:
        return encode(other_shape(random, key, "pd:reqs"))
    progress = RequestProgress.new(REQUEST, at=1.0)  # type: ignore[arg-type]
    progress = progress.advance(random.choice((RequestState.FAILED, RequestState.CANCELLED)), at=2.0)
    progress = replace(progress, outcome="stop")
    record = {"request_id": REQUEST, "state": "failed", "phases": {"finish": 1.0}, "tenant": None}
    fields = _fields(_to_fields(StoredRequest(progress=progress, record=json.dumps(record))))
    for _ in range(random.randint(1, 3)):
        _damage(fields, random)
    return encode([["DEL", key], ["HSET", key, *_flat(fields)], ["LPUSH", "pd:reqs", random.choice((REQUEST, "\xff"))]])


def index(random: Random) -> bytes:
    """The prefix index: sets of blocks, incarnations, head and stream."""
    epoch, name = random.choice((*_NUMBERS, "7")), random.choice((STRANGER, *WORKERS, "\xff"))
    blocks = f"pd:blocks:{name}:{epoch}"
    hashes = random.choice(("a" * 16, "a" * 32, "a" * 15, "", "b" * 16 * 513, "c" * 16 * 60_000))
    sequence = (
        f"{random.choice(('9999999999999999999', '1', '18446744073709551615'))}-{random.choice(('1', '7', '9999999'))}"
    )
    entry = {"worker": name, "epoch": epoch, "kind": random.choice(("reset", "delta", "gone", "\xff")), "added": hashes}
    entry["removed"] = random.choice(("", hashes))
    if random.random() < 0.3:
        _damage(entry, random)
    number = random.choice(_NUMBERS)
    kinds: tuple[Commands, ...] = (
        other_shape(random, "pd:kv-workers", "pd:kv-head", "pd:kv-events", blocks),
        [["HSET", "pd:kv-workers", name, f"{epoch} {number}"], ["SADD", blocks, hashes]],
        [["HSET", "pd:kv-head", random.choice(("generation", "sequence")), number]],
        [["XADD", "pd:kv-events", sequence, *_flat(entry)]],
        [["DEL", "pd:kv-events"], ["XADD", "pd:kv-events", sequence, *_flat(entry)]],
    )
    return encode(random.choice(kinds))


def note(random: Random) -> bytes:
    """What workers leave when they end."""
    key = random.choice(("pd:exit:decode-0", "pd:death:decode-0:1"))
    if random.random() < 0.3:
        return encode(other_shape(random, key))
    text = random.choice((*_BYTES, "killed serving", "killed \xff", "gen-1\ngen-2", "\n" * 5000))
    return encode([["SET", key, damaged_bytes(text.encode("latin-1"), random).decode("latin-1")]])


def usage(random: Random) -> bytes:
    """What keys have used on a day. The router adds to the first field."""
    key = f"pd:usage:{USAGE_DAY}"
    if random.random() < 0.2:
        return encode(other_shape(random, key))
    name = random.choice(("t:k:m", "t:k:m", "t:k:", "t:k", "@0", ":" * 9, "\xff:k:m", "t:k:" + "m" * 20_000))
    numbers = [random.choice((*_NUMBERS, "1", "7")) for _ in range(random.choice((4, 4, 4, 3, 5)))]
    value = " ".join(numbers) if random.random() < 0.8 else random.choice(_BYTES)
    return encode([["HSET", key, name, value]])


def _damage(fields: dict[str, str], random: Random) -> None:
    name = random.choice(list(fields))
    value = fields[name]
    if random.random() < 0.1:
        del fields[name]
        fields["of_a_later_version"] = value
    elif value.startswith(("{", "[")) and random.random() < 0.8:
        try:
            damaged = damaged_json(value.encode(), random)
        except (ValueError, RecursionError):  # It is damaged already.
            damaged = damaged_bytes(value.encode("latin-1", errors="replace"), random)
        fields[name] = damaged.decode("latin-1")
    else:
        fields[name] = random.choice((*_NUMBERS, *_BYTES, value + "x", "127.0.0.1:99999", "h:x", "[::1]:1", "prefill"))


def _fields(fields: dict[str, str]) -> dict[str, str]:
    return {name: value.encode().decode("latin-1") for name, value in fields.items()}


def _load(load: WorkerLoad) -> dict[str, object]:
    return {"free_blocks": load.free_blocks, "prefill_tokens_per_s": load.prefill_tokens_per_s}


def _flat(fields: dict[str, str]) -> list[str]:
    return [text for field in fields.items() for text in field]
