"""Log lines of the form `time level process logger event key=value ...`, with the request id where there is one."""

from __future__ import annotations

import contextvars
import logging
import sys
from datetime import UTC, datetime

#: Id of the request being handled; added to every line logged meanwhile.
request_id_var: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)

LEVELS = ("debug", "info", "warning", "error")


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


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = dict(getattr(record, "fields", {}))
        request_id = request_id_var.get()
        if request_id is not None:
            fields.setdefault("request_id", request_id)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = " ".join([record.getMessage(), *(f"{name}={_quote(value)}" for name, value in fields.items())])
        line = f"{time} {record.levelname:<7} {self._process} {record.name} {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quote(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return repr(text) if any(character in text for character in ' "\n=') or not text else text


def configure(process: str, level: str = "info") -> None:
    """Sends this process's log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # aiohttp's access log would add a line per request to pdserve's own, which says more.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
