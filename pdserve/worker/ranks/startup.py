"""Messages between rank 0 and a follower that starts: lines of JSON on the socket for copies."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from pdserve.worker.config import WorkerConfig

#: The setting that is not passed on: a follower does not need it, and it may contain a password.
_WITHHELD = "redis_url"
_TUPLES = ("cpus", "borrow_cpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig(WorkerConfig):
    """The settings of a worker, without those of its tier."""

    num_decoding: int = 0

    @property
    def max_decoding(self) -> int:
        """Largest number of sequences that one step of the worker decodes."""
        return self.num_decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything a follower needs at start."""

    rank: int
    name: str
    rendezvous: str
    #: The worker's settings, the same for all ranks. Each derives its own from them.
    config: WorkerConfig

    def to_json(self) -> dict[str, object]:
        """The form that `from_json` reads."""
        config = {field.name: getattr(self.config, field.name) for field in fields(WorkerConfig)}
        config[_WITHHELD] = ""
        config["num_decoding"] = self.config.max_decoding
        return {"rank": self.rank, "name": self.name, "rendezvous": self.rendezvous, "config": config}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RankSetup:
        """The setup, with a `FollowerConfig`."""
        config = dict(message["config"])
        for name in _TUPLES:
            config[name] = tuple(config[name])
        return cls(
            rank=message["rank"],
            name=message["name"],
            rendezvous=message["rendezvous"],
            config=FollowerConfig(**config),
        )


class SetupState(StrEnum):
    """The start-up states of a follower."""

    FAILED = "failed"
    #: It has read its setup and is about to meet the other ranks.
    STARTED = "started"
    #: It has loaded its shard and computes from now on.
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReply:
    """A follower's report while it starts."""

    state: SetupState
    #: Reason for a failure.
    error: str = ""
    #: Whether it failed because other ranks do not answer: one of those knows the cause.
    is_consequence: bool = False

    def to_json(self) -> dict[str, object]:
        """The form that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> SetupReply:
        """The reply."""
        return cls(state=SetupState(message["state"]), error=message["error"], is_consequence=message["is_consequence"])


def send_line(stream: socket.socket, message: Mapping[str, object]) -> None:
    """Sends one line of JSON. Raises `OSError` when the other end is gone."""
    stream.sendall(json.dumps(message).encode() + b"\n")


def receive_line(stream: socket.socket, timeout_s: float | None = None) -> dict[str, Any] | None:
    """The next line; None when the other end is gone. Raises `TimeoutError`."""
    stream.settimeout(timeout_s)
    try:
        line = bytearray()
        while not line.endswith(b"\n"):
            # Byte by byte: whatever follows the line belongs to the next reader of the socket.
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
