"""What a follower is told when it starts, and what it answers: lines of JSON on the socket for copies."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pdserve.worker.config import WorkerConfig

#: Not a follower's business, and it may hold a password.
_KEPT = "redis_url"
_TUPLES = ("cpus", "borrow_cpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig(WorkerConfig):
    """A worker's settings, without its tier."""

    num_decoding: int = 0

    @property
    def max_decoding(self) -> int:
        """As of the worker."""
        return self.num_decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything a follower has to know."""

    rank: int
    name: str
    rendezvous: str
    #: As all ranks have it: each takes its own part.
    config: WorkerConfig

    def to_json(self) -> dict[str, object]:
        """What `from_json` reads."""
        config = {field.name: getattr(self.config, field.name) for field in fields(WorkerConfig)}
        config[_KEPT] = ""
        config["num_decoding"] = self.config.max_decoding
        return {"rank": self.rank, "name": self.name, "rendezvous": self.rendezvous, "config": config}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RankSetup:
        """The order, with a `FollowerConfig`."""
        config = dict(message["config"])
        for name in _TUPLES:
            config[name] = tuple(config[name])
        return cls(
            rank=message["rank"],
            name=message["name"],
            rendezvous=message["rendezvous"],
            config=FollowerConfig(**config),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReply:
    """What a follower says while it is started: how far it is, or what has gone wrong."""

    state: str = ""
    error: str = ""
    #: What has gone wrong is that others do not answer: one of those knows why.
    hearsay: bool = False

    def to_json(self) -> dict[str, object]:
        """What `SetupReply(**...)` takes."""
        return asdict(self)


def send_line(stream: socket.socket, message: Mapping[str, object]) -> None:
    """Raises `OSError` when the other end is gone."""
    stream.sendall(json.dumps(message).encode() + b"\n")


def receive_line(stream: socket.socket, timeout_s: float | None = None) -> dict[str, Any] | None:
    """The next line; None when the other end is gone. Raises `TimeoutError`."""
    stream.settimeout(timeout_s)
    try:
        line = bytearray()
        while not line.endswith(b"\n"):
            # One by one: what comes after the line is not ours.
            received = stream.recv(1)
            if not received:
                return None
            line += received
    except ConnectionError:
        return None
    finally:
        stream.settimeout(None)
    message: dict[str, Any] = json.loads(line)
    return message
