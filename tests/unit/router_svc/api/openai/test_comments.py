"""Comments between server-sent events, as openai's client reads them."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from router_svc.api.event_ids import EventIds
from router_svc.api.openai.chat_format import ChatFormat
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.shapes import ResponseFormatter
from router_svc.generation import Generation
from router_svc.request.output import ChoiceDelta


@pytest.mark.parametrize("has_ids", [False, True])
async def test_comments_are_no_events_for_a_client_that_keeps_the_last_id(has_ids: bool) -> None:
    """Fails with a comment that ends with an empty line where events have ids."""
    from openai._streaming import SSEDecoder

    request = GenerationRequest(
        response_id="chatcmpl-1",
        model="m",
        created=1,
        generations=(cast(Generation, None),),
        stream=True,
        include_usage=False,
        continuous_usage=False,
    )
    ids = EventIds("9f3c01aa", 1) if has_ids else None
    formatter = ResponseFormatter(request, ChatFormat(cast(Any, None)), ids)
    sent = formatter.comment
    for text in ("one", "two"):
        sent += await formatter.events([ChoiceDelta(choice_index=0, text=text, token_ids=(7,))], None)
        sent += formatter.comment * 2
    events = [event.data for event in SSEDecoder().iter_bytes(iter([sent + b"data: [DONE]\n\n"]))]
    assert [json.loads(data)["choices"][0]["delta"]["content"] for data in events[:-1]] == ["one", "two"]
    assert events[-1] == "[DONE]"
