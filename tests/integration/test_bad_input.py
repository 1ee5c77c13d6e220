"""Bad input gets a 4xx that names the field and the reason, and no other client notices."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.support.cluster import MODEL, Cluster

COMPLETION = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def _post(cluster: Cluster, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{cluster.base_url}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


CASES = [
    # body, expected status, field named in the error, text within the message
    (COMPLETION | {"model": "gpt-17"}, 404, "model", "gpt-17"),
    (COMPLETION | {"prompt": ""}, 400, "prompt", ""),
    (COMPLETION | {"prompt": []}, 400, "prompt", ""),
    (COMPLETION | {"prompt": 7}, 400, "prompt", ""),
    (COMPLETION | {"prompt": list(range(10_000))}, 400, "prompt", "10000"),
    (COMPLETION | {"prompt": [1, 2, 60_000]}, 400, "prompt", "60000"),
    (COMPLETION | {"prompt": [1, -2]}, 400, "prompt", ""),
    (COMPLETION | {"max_tokens": -1}, 400, "max_tokens", ""),
    (COMPLETION | {"max_tokens": "many"}, 400, "max_tokens", ""),
    (COMPLETION | {"max_tokens": 100_000}, 400, "max_tokens", "8192"),
    (COMPLETION | {"temperature": -0.5}, 400, "temperature", ""),
    (COMPLETION | {"temperature": float("nan")}, 400, "temperature", "finite"),
    (COMPLETION | {"top_p": 0}, 400, "top_p", ""),
    (COMPLETION | {"n": 100_000}, 400, "n", "128"),
    (COMPLETION | {"n": 0}, 400, "n", ""),
    (COMPLETION | {"logprobs": 1000}, 400, "logprobs", "20"),
    (COMPLETION | {"logit_bias": {"60000": 1.0}}, 400, "logit_bias", ""),
    (COMPLETION | {"stop_token_ids": [10**9]}, 400, "stop_token_ids", ""),
    (COMPLETION | {"stop": [""]}, 400, "stop", ""),
    (COMPLETION | {"tempratur": 1}, 400, "tempratur", "tempratur"),
    (COMPLETION | {"stream_options": {"include_usage": True}}, 400, "stream_options", ""),
    (CHAT | {"messages": []}, 400, "messages", ""),
    (CHAT | {"messages": [{"role": "user"}]}, 400, "messages", ""),
    (CHAT | {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages", ""),
    (CHAT | {"top_logprobs": 3}, 400, "top_logprobs", ""),
    (CHAT | {"kv_transfer_params": {"remote": 1}}, 400, "kv_transfer_params", "kv_transfer_params"),
]


@pytest.mark.parametrize(("body", "status", "param", "needle"), CASES, ids=lambda value: str(value)[:40])
def test_an_invalid_field_is_named(
    cluster: Cluster, body: dict[str, Any], status: int, param: str, needle: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    got, error = _post(cluster, path, json.dumps(body).encode())
    assert got == status, error
    assert (error["param"] or "").partition(".")[0].partition("[")[0] == param, error
    assert needle in error["message"]
    assert error["code"] == status
    assert error["type"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "\xff\xfe"}', 400),
        (b"[" * 100_000, 413),
        (json.dumps(COMPLETION | {"prompt": "x" * 10_000_000}).encode(), 413),
    ],
    ids=["empty", "truncated", "list", "invalid UTF-8", "deep", "10 MB"],
)
def test_an_invalid_body_is_refused(cluster: Cluster, body: bytes, status: int) -> None:
    got, error = _post(cluster, "/v1/completions", body)
    assert got == status
    assert error["message"]


def test_an_unknown_path_and_a_wrong_method_have_the_same_error_shape(cluster: Cluster) -> None:
    assert _post(cluster, "/v1/nothing", b"{}")[0] == 404
    assert _post(cluster, "/v1/models", b"{}")[0] == 405


def test_bad_input_does_not_disturb_another_stream(cluster: Cluster) -> None:
    """Nor does it make any process start anew, as one request did to a peer's engine (CVE-2026-9540).

    Fails when the router ends with the answer to a request that it refuses.
    """
    before = {name: each.pid for name, each in cluster.processes().items()}
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    with cluster.client() as client:
        expected = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
        got = []
        for chunk in client.completions.create(**options, stream=True):
            got.append(chunk.choices[0].text)
            if len(got) <= len(CASES):
                _post(cluster, "/v1/completions", json.dumps(CASES[len(got) - 1][0]).encode())
    assert "".join(got) == "".join(expected)
    assert {name: each.pid for name, each in cluster.processes().items()} == before
