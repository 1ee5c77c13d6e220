"""The answers of /v1/batches, in OpenAI's form."""

from __future__ import annotations

from typing import Literal, cast

from typing_extensions import TypedDict

from router_svc.state.batch_record import BatchRecord

WINDOW = "24h"
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]


class BatchError(TypedDict):
    """Why a batch failed."""

    code: str
    message: str
    line: int | None
    param: None


class BatchErrors(TypedDict):
    """All reasons."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    """Requests of a batch, and those that have ended."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """A batch. Times are in seconds of Unix time."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """Batches, in pages."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batch_object(record: BatchRecord) -> BatchObject:
    """A batch as clients get it. Files of results are there once it has ended."""
    errors: list[BatchError] = [
        {"code": each.code, "message": each.message, "line": each.line, "param": None} for each in record.errors
    ]
    ended = record.is_terminal
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": WINDOW,
        "status": cast(Status, record.status),
        "output_file_id": record.output_file_id if ended and record.output.num_bytes else None,
        "error_file_id": record.error_file_id if ended and record.error.num_bytes else None,
        "created_at": record.created_at,
        "in_progress_at": record.times.get("in_progress"),
        "expires_at": record.expires_at,
        "finalizing_at": record.times.get("finalizing"),
        "completed_at": record.times.get("completed"),
        "failed_at": record.times.get("failed"),
        "expired_at": record.times.get("expired"),
        "cancelling_at": record.times.get("cancelling"),
        "cancelled_at": record.times.get("cancelled"),
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "metadata": record.metadata,
    }
