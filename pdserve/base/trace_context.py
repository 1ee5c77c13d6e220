"""The W3C's trace context: what a process needs of a request's trace to add to it. Pure."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

#: Name of the HTTP header and of the gRPC metadata that carry a context.
TRACEPARENT = "traceparent"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 0x01
#: Longest header that is looked at: later versions may append fields.
_MAX_TRACEPARENT = 256


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's position in its trace, as other processes get it. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """The context as the W3C's header."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.is_sampled)}"

    def child(self) -> TraceContext:
        """The context of a new span below this one."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.is_sampled)


def parse_traceparent(text: str | None) -> TraceContext | None:
    """The context of a header; None without one, or for one that is malformed: a request is never refused for it.

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
    """
    if not text or len(text) > _MAX_TRACEPARENT:
        return None
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def traceparent_of(context: TraceContext | None) -> str:
    """The header for a context; empty without one."""
    return "" if context is None else context.traceparent
