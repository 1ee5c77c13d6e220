"""Log lines: `time level process logger event key=value ...`, or one JSON object per line.

Both have the request's id where there is one. JSON lines also have the ids of its trace and span.
"""

from __future__ import annotations

import contextvars
import json
import logging
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from pdserve.base.trace_context import TraceContext

#: Id of the request being handled; added to every line logged meanwhile.
request_id_var: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
#: Span of the request being handled; JSON lines have its ids.
trace_var: contextvars.ContextVar[TraceContext | None] = contextvars.ContextVar("trace", default=None)

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_JSON_TYPES = (str, bool, int, float, type(None))


def enter_request(request_id: str, trace: TraceContext | None) -> None:
    """Adds the ids of a request to the lines of this task. The task must be the request's own, and end with it."""
    request_id_var.set(request_id)
    trace_var.set(trace)


class EventLogger:
    """Logs an event name with fields: `log.info("worker_ready", worker=id)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """A detail for following one request through the code."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """A change of state that matters to an operator; never per token."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """A degradation or a retry."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, exc: BaseException | None = None, **fields: object) -> None:
        """A failure; `exc` adds its traceback."""
        self._log(logging.ERROR, event, fields, exc)

    def _log(self, level: int, event: str, fields: dict[str, object], exc: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc)


def get_logger(name: str) -> EventLogger:
    """The module's logger."""
    return EventLogger(name)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """A copy of the event's fields, with the request's id."""
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    request_id = request_id_var.get()
    if request_id is not None:
        fields.setdefault("request_id", request_id)
    return fields


def _time_of(record: logging.LogRecord) -> str:
    """The time of RFC 3339, in UTC with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields_of(record)
        text = " ".join([record.getMessage(), *(f"{name}={quote(value)}" for name, value in fields.items())])
        line = f"{_time_of(record)} {record.levelname:<7} {self._process} {record.name} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def quote(value: object) -> str:
    """The value as it stands in a text line."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if text and is_plain else repr(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, logger, event, then the fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        trace = trace_var.get()
        if trace is not None:
            line |= {"trace_id": trace.trace_id, "span_id": trace.span_id}
        # A field of one of these names would hide what every line has.
        line |= {name if name not in line else f"{name}_": value for name, value in _plain(_fields_of(record)).items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _plain(fields: Mapping[str, object]) -> dict[str, object]:
    """Fields as JSON has them: numbers that JSON lacks, and everything that is no plain value, become text."""
    return {
        name: value
        if isinstance(value, _JSON_TYPES) and not (isinstance(value, float) and not math.isfinite(value))
        else str(value)
        for name, value in fields.items()
    }


def configure(process: str, level: str = "info", log_format: str = "text") -> None:
    """Sends this process's log lines to standard error, in one of `FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Warnings of Python and its libraries are lines, too, where every line has to be an object.
    logging.captureWarnings(log_format == "json")
    # aiohttp's access log would add a line per request to pdserve's own, which says more.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
