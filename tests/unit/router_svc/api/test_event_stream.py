"""Streams before their first event."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from pdserve.base.errors import NoWorkers
from router_svc.api.event_stream import EventStream
from router_svc.api.ids import Ids
from router_svc.request.stream import TokenUsage


class _Silent:
    """A source that has been admitted, is silent until its connection has to be kept open, and then fails."""

    is_admitted = True
    usage = TokenUsage(prompt_tokens=1, completion_tokens=0, cached_tokens=0)

    async def write_to(self, write: Any, keep_alive: Callable[[], Awaitable[None]] | None = None) -> None:
        """Fails."""
        assert keep_alive is not None
        await keep_alive()
        raise NoWorkers("No worker is ready.")

    def first_write(self) -> None:
        """Never: there is none."""


class _Form:
    """A format with or without comments."""

    content_type = "application/x-ndjson"

    def __init__(self, comment: bytes) -> None:
        self.comment = comment

    def failed(self, error: Exception) -> bytes:
        """The error as the last line."""
        return str(error).encode()


@pytest.mark.parametrize(("comment", "has_own_status"), [(b"", True), (b": wait\n\n", False)])
async def test_headers_go_out_early_only_where_the_format_has_comments(comment: bytes, has_own_status: bool) -> None:
    """Lines of JSON have none: an error before the first line keeps its own status."""
    events, form = EventStream(make_mocked_request("POST", "/"), Ids.make("", None)), _Form(comment)
    with pytest.raises(NoWorkers) as raised:
        await events.send(form, _Silent())  # type: ignore[arg-type]
    if has_own_status:
        with pytest.raises(NoWorkers):
            events.fail(raised.value)
    else:
        events.fail(raised.value)
