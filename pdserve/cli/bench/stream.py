"""Parses the server-sent events of a streamed completion: bytes in, chunks out. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pdserve.base.errors import PdserveError

DONE = b"[DONE]"
_SHOWN_BYTES = 200


class StreamRefused(PdserveError):
    """An event reports an error instead of a completion."""


class NotACompletion(PdserveError):
    """An event does not have the form of the API."""


class EventReader:
    """Extracts the payloads of events from a byte stream that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Adds bytes; returns the payloads that are now complete. Comments and other fields are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The server's count of tokens."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChunk:
    """One event. `has_token`: it carries at least one token, which may have no text."""

    text: str = ""
    has_choice: bool = False
    has_token: bool = False
    is_finished: bool = False
    usage: TokenCounts | None = None


def read_chunk(payload: bytes) -> CompletionChunk:
    """Reads the chunk of a completion or a chat completion. Raises `StreamRefused` and `NotACompletion`."""
    try:
        content: Any = json.loads(payload)
        if content.get("error"):
            raise StreamRefused(_error_text(content["error"]))
        usage = _usage(content.get("usage"))
        if not content.get("choices"):
            return CompletionChunk(usage=usage)
        return _choice_chunk(content["choices"][0], usage)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotACompletion(f"not a chunk of a completion: {payload[:_SHOWN_BYTES]!r}") from error


def _choice_chunk(choice: dict[str, Any], usage: TokenCounts | None) -> CompletionChunk:
    """Parses a choice. Some servers' last chunk only has the finish reason, and a chat's first only the role."""
    is_finished = choice.get("finish_reason") is not None
    delta = choice.get("delta")
    if delta is None:
        text, is_announcement = choice.get("text") or "", False
    else:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text, is_announcement = reasoning + (delta.get("content") or ""), "role" in delta
    return CompletionChunk(
        text=text,
        has_choice=True,
        has_token=bool(text) or not (is_finished or is_announcement),
        is_finished=is_finished,
        usage=usage,
    )


def _usage(usage: dict[str, Any] | None) -> TokenCounts | None:
    if not usage:
        return None
    return TokenCounts(input_tokens=int(usage["prompt_tokens"]), output_tokens=int(usage.get("completion_tokens") or 0))


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)
