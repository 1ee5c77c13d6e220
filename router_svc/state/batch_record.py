"""One batch as it is stored: what was ordered, how far it is, and where its results are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from pdserve.base.errors import Unreadable
from router_svc.state.file_record import Content
from router_svc.state.response_record import tenant_name

#: States in which nothing changes any more.
TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
#: What the names of groups of batches end with.
GROUP_END = "-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """Why a batch failed. `line` counts from 1; None: it is no line's fault."""

    code: str
    message: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A stored batch. Times are in seconds of Unix time."""

    id: str
    #: Whose it is, and the key that sent it.
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    #: The ids that the files of results will have.
    output_file_id: str
    error_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: str = "validating"
    #: When each later status was reached.
    times: dict[str, int] = field(default_factory=dict)
    errors: list[LineError] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    #: Results so far: of requests that succeeded, and of the others.
    output: Content = field(default_factory=Content)
    error: Content = field(default_factory=Content)
    #: Routers that have run it since its last result.
    attempts: int = 0

    @property
    def is_terminal(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in TERMINAL

    @property
    def key(self) -> str:
        """The key of the record."""
        return batch_key(self.tenant, self.id)

    def to_bytes(self) -> bytes:
        """The record as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BatchRecord:
        """The record of its JSON. Raises `Unreadable`."""
        try:
            fields = json.loads(data)
            contents = {name: Content(**fields.pop(name)) for name in ("output", "error")}
            errors = [LineError(**each) for each in fields.pop("errors")]
            return cls(**fields, output=contents["output"], error=contents["error"], errors=errors)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unreadable(f"The stored batch cannot be read: {error!r:.200}.") from error


def batches_group(tenant: str) -> str:
    """The group of a tenant's batches, which is listed."""
    return f"{tenant_name(tenant)}{GROUP_END}"


def batch_key(tenant: str, batch_id: str) -> str:
    """The key of a batch's record."""
    return f"{batches_group(tenant)}:{batch_id}"


def is_batch_key(key: str) -> bool:
    """Whether this is the key of a batch."""
    return f"{GROUP_END}:" in key
