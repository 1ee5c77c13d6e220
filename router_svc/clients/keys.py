"""API keys as values: a table of them by digest, and the file that lists them. A key itself is never kept. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Annotated, Self

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError, model_validator

from pdserve.base.errors import SetupError
from router_svc.generation import MAX_PRIORITY
from router_svc.request.client import Client
from router_svc.request.limits import Limits, Period

#: Tenant of the keys that are given as a flag.
FLAG_TENANT = "default"
MAX_KEYS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key without the key: its digest, and what its owner may do."""

    sha256: bytes
    client: Client
    #: Unix time from which it is refused; None: never.
    expires_at: float | None = None


class KeyTable:
    """Keys by digest."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.sha256: key for key in keys}
        senders = (key.client for key in self._keys.values() if not key.client.reads_metrics_only)
        #: Tenants of those who may send requests, in the order of their keys.
        self.tenants = tuple(dict.fromkeys(client.tenant for client in senders))

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented, or None.

        The time this takes says nothing about keys: what is looked up is a digest, which nobody can approach bit by
        bit, and the last comparison takes the same time wherever two digests differ.
        """
        digest = digest_of(presented)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.sha256, digest) else None

    def client_of(self, key_id: str) -> ApiKey | None:
        """A key of this id, or None."""
        return next((key for key in self._keys.values() if key.client.id == key_id), None)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key's text."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def flag_keys(keys: Iterable[str]) -> list[ApiKey]:
    """Keys of the operator, who may do everything. They share one tenant."""
    return [
        ApiKey(sha256=digest_of(key), client=Client(id=f"key-{index}", tenant=FLAG_TENANT, is_admin=True))
        for index, key in enumerate(keys, 1)
    ]


def _unix_time(value: object) -> object:
    """The end of a key as Unix time. Dates and times without a zone are in UTC."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return value


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


#: Exact as a number of Lua. 0 is no limit.
_Limit = Annotated[int, Ge(0), Le(10**12)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: _Name
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9A-Fa-f]{64}$")]
    tenant: _Name | None = None
    admin: bool = False
    metrics: bool = False
    weight: Annotated[float, Gt(0), Le(1000)] = 1.0
    models: Annotated[list[Annotated[str, MinLen(1)]], MinLen(1)] | None = None
    priority_ceiling: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] = 0
    expires: Annotated[float, BeforeValidator(_unix_time)] | None = None
    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    parallel: _Limit = 0
    budget: _Limit = 0
    budget_period: Period = "month"

    @model_validator(mode="after")
    def _is_either(self) -> Self:
        if self.admin and self.metrics:
            raise ValueError("a key is either an admin's or for metrics")
        return self

    def key(self) -> ApiKey:
        limits = Limits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            parallel=self.parallel,
            budget=self.budget,
            budget_period=self.budget_period,
        )
        return ApiKey(
            sha256=bytes.fromhex(self.sha256),
            client=Client(
                id=self.id,
                weight=self.weight,
                tenant=self.tenant or self.id,
                is_admin=self.admin,
                reads_metrics_only=self.metrics,
                priority_ceiling=self.priority_ceiling,
                limits=limits if limits.any else None,
                models=frozenset(self.models or ()),
            ),
            expires_at=self.expires,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    keys: Annotated[list[_Entry], MaxLen(MAX_KEYS)]


def parse_keys(text: str, path: str) -> list[ApiKey]:
    """The keys of a file, which is TOML, or JSON where its name ends so. Raises `SetupError`, never with a digest."""
    content = _content(text, path)
    try:
        entries = _File.model_validate(content).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SetupError(f"The file of API keys {path} is not valid: {where}: {first['msg']}. Correct it.") from None
    for name, values in (("id", [entry.id for entry in entries]), ("sha256", [e.sha256.lower() for e in entries])):
        if len(set(values)) < len(values):
            raise SetupError(f"The file of API keys {path} has two entries with the same `{name}`. Remove one.")
    return [entry.key() for entry in entries]


def _content(text: str, path: str) -> Mapping[str, object] | object:
    try:
        return json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = "JSON" if path.endswith(".json") else "TOML"
        raise SetupError(f"The file of API keys {path} is not valid {kind}: {error}.") from None
