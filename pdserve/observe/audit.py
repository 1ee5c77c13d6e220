"""The audit log: what operators did to a service, and which requests were refused to whom and why. Never a prompt.

Its logger, `audit`, writes to the file of `--audit-log`, else to the log of the process. Refusals of one kind are
counted: the first of an interval is a line of its own, and the others are one line at its end. A flood of refused
requests therefore costs a counter, not a line each.
"""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper

from pdserve.base.errors import CapacityError, PdserveError, RequestError, SetupError, codes_of, reason_of
from pdserve.base.logs import JsonFormatter, get_logger

#: Interval for which refusals of one kind are counted.
INTERVAL_S = 10.0
#: Kinds of refusals that are distinguished within an interval. Further ones are counted together.
MAX_KINDS = 32
#: Length up to which texts of clients are kept.
_MAX_TEXT = 100
#: Time between two lines about an audit log that cannot be written.
_FAILURE_EVERY_S = 60.0

audit = get_logger("audit")
log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalKind:
    """What refusals have in common that are counted together."""

    reason: str
    #: HTTP status, for gRPC as well.
    status: int
    client: str
    endpoint: str
    model: str


@dataclass(slots=True)
class _Count:
    number: int = 0
    last_request_id: str = ""


@dataclass(slots=True)
class RefusalCounts:
    """Refusals of the current interval. Pure."""

    kinds: dict[RefusalKind, _Count] = field(default_factory=dict)
    #: Refusals of further kinds.
    others: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was refused."""
        return not self.kinds and not self.others

    def add(self, kind: RefusalKind, request_id: str) -> bool:
        """Counts a refusal. True for the first of its kind, which is worth a line."""
        count = self.kinds.get(kind)
        if count is None:
            if len(self.kinds) == MAX_KINDS:
                self.others += 1
                return False
            self.kinds[kind] = _Count()
            return True
        count.number += 1
        count.last_request_id = request_id
        return False

    def repeated(self) -> Iterator[tuple[RefusalKind, int, str]]:
        """The kinds that came more than once: how many after the first, and the id of the last."""
        for kind, count in self.kinds.items():
            if count.number:
                yield kind, count.number, count.last_request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request, and what for. Texts may be any that a client chose."""

    client: str
    endpoint: str
    model: str = ""
    request_id: str = ""
    #: The header of that name: what proxies claim, not what the connection shows.
    forwarded_for: str = ""


def action(name: str, **fields: object) -> None:
    """Writes that an operator, or the platform for one, has done something to this service."""
    audit.info(name, **fields)


def stop_requested(signal_name: str) -> None:
    """Writes that a signal wants this service to end."""
    action("stop_requested", signal=signal_name)


class Refusals:
    """Writes which requests were refused. Belongs to the event loop."""

    def __init__(self) -> None:
        self._counts = RefusalCounts()
        self._timer: asyncio.TimerHandle | None = None

    def refused(self, error: PdserveError, caller: Caller) -> None:
        """A request ended with `error`. Failures of the cluster are no refusals, and are not written."""
        if not isinstance(error, RequestError | CapacityError):
            return
        kind = RefusalKind(
            reason=reason_of(error),
            status=codes_of(error).http,
            client=caller.client,
            endpoint=caller.endpoint[:_MAX_TEXT],
            model=caller.model[:_MAX_TEXT],
        )
        if self._counts.add(kind, caller.request_id[:_MAX_TEXT]):
            more = {"request_id": caller.request_id[:_MAX_TEXT], "forwarded_for": caller.forwarded_for[:_MAX_TEXT]}
            audit.info("request_refused", **asdict(kind), **{name: text for name, text in more.items() if text})
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)

    def flush(self) -> None:
        """Ends the interval: what was counted is written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = self._counts, RefusalCounts()
        for kind, number, last_request_id in counts.repeated():
            audit.info("requests_refused", count=number, last_request_id=last_request_id, **asdict(kind))
        if counts.others:
            audit.info("requests_refused", count=counts.others, reason="others", kinds_written=MAX_KINDS)

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Writes the refusal that ends the block, if one does."""
        try:
            yield
        except PdserveError as error:
            self.refused(error, caller)
            raise


class _AuditFile(logging.handlers.WatchedFileHandler):
    """Appends to a file, and opens it again when it was moved away or removed, as logrotate does."""

    _failed_at = float("-inf")

    def _open(self) -> TextIOWrapper:
        # Client addresses are in it: not for every user of the machine.
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return open(descriptor, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """A full disk refuses no request: the line is lost, and that is said now and then."""
        now = time.monotonic()
        if now - self._failed_at >= _FAILURE_EVERY_S:
            self._failed_at = now
            log.error("audit_log_failed", path=self.baseFilename, lost=record.getMessage())


@contextmanager
def audit_file(path: str | None, process: str) -> Iterator[None]:
    """Has the audit log go to this file, one JSON object per line, until the block ends. Raises `SetupError`.

    SIGHUP is ignored then: programs that rotate logs send it, and would otherwise end the process.
    """
    if path is None:
        yield
        return
    try:
        handler = _AuditFile(path)
    except OSError as error:
        raise SetupError(
            f"Cannot write the audit log {path}: {error.strerror}. Choose another with --audit-log."
        ) from error
    handler.setFormatter(JsonFormatter(process))
    logger = logging.getLogger("audit")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        handler.close()
