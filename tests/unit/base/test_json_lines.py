"""JSON on one line, for readers that end lines at more characters than a newline."""

from __future__ import annotations

import json

from pdserve.base.batch_lines import result_line
from pdserve.base.json_lines import on_one_line
from router_svc.api.json_pieces import object_to_json, to_json
from router_svc.state.response_record import ShownResponse

TEXT = "1\u20282\u20293\x854"


def _is_one_line(data: bytes) -> bool:
    return len(data.decode().splitlines()) == 1


def test_texts_are_the_same_and_on_one_line() -> None:
    for made in (to_json({"text": TEXT}), object_to_json(json.dumps({"text": TEXT}, ensure_ascii=False))):
        assert _is_one_line(made)
        assert json.loads(made) == {"text": TEXT}
    assert on_one_line(b"plain") == b"plain"


def test_a_result_of_a_batch_is_a_line_whatever_its_client_has_named_it() -> None:
    line = result_line(TEXT, 200, "r", json.dumps({"a": TEXT}, ensure_ascii=False).encode())
    assert _is_one_line(line)
    assert json.loads(line)["custom_id"] == json.loads(line)["response"]["body"]["a"] == TEXT


def test_a_response_that_has_ended_is_sent_on_one_line() -> None:
    body = json.dumps({"instructions": TEXT}).encode()
    ended = ShownResponse(id="r", status="in_progress", body=body).ended("failed", None)
    assert _is_one_line(ended.body)
    assert json.loads(ended.body) == {"instructions": TEXT, "status": "failed", "error": None}
