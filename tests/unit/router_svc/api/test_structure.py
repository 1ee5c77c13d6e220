"""The structure of a body is counted before it is parsed."""

from __future__ import annotations

import json
import random

import pytest

from pdserve.base.errors import RequestError, TooLarge
from router_svc.api.openai.schema import ChatBody
from router_svc.api.parse import parse_body
from router_svc.api.structure import MAX_CONTAINERS, MAX_VALUES, Structure, require_light, structure_of


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MAX_CONTAINERS + b"1]",
        b"[" + b"{}," * MAX_CONTAINERS + b"1]",
        b"{" + b",".join(b'"%d":1' % key for key in range(MAX_CONTAINERS + 1)) + b"}",
        b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
    ],
    ids=["lists", "objects", "keys", "values"],
)
def test_a_body_of_very_many_values_is_refused_without_parsing_it(body: bytes) -> None:
    # The last byte is cut off: the parser would find the text invalid.
    with pytest.raises(TooLarge, match=r"limit \d+\)\. Send less"):
        parse_body(ChatBody, body[:-1])


def test_a_million_token_ids_and_a_text_of_nothing_but_separators_are_light() -> None:
    require_light(b"[" + b"1," * 1_000_000 + b"1]")
    require_light(json.dumps(['[{,:\\"' * 500_000]).encode())


def test_counts_are_those_of_the_parsed_text_wherever_the_pieces_end() -> None:
    random_ = random.Random(5)
    for _ in range(20):
        texts = ["".join(random_.choices('\\"[{,:a', k=random_.randrange(40))) for _ in range(8000)]
        body = json.dumps([{text: 1} for text in texts], separators=(",", ":")).encode()
        assert len(body) > 128 * 1024
        assert structure_of(body) == Structure(containers=1 + 2 * len(texts), values=len(texts) - 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {f"x{key}": 1 for key in range(500)}},
        {"chat_template_kwargs": {f"x{key}": 1 for key in range(500)}},
        {"messages": [{"role": "user", "content": "x", **{f"x{key}": 1 for key in range(500)}}]},
        {"metadata": {"deep": [{f"x{key}": 1 for key in range(500)}]}},
    ],
    ids=["options", "kwargs", "message", "ignored"],
)
def test_an_object_with_hundreds_of_keys_is_refused_before_validation(fields: dict[str, object]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True} | fields
    with pytest.raises(TooLarge, match=r"has 50[0-2] keys \(limit 300\)"):
        parse_body(ChatBody, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"mood": "x" * 4097}, "has 4097 characters .limit 4096"),
        ({"mood": 10**4000}, "at most 64 bits"),
        ({"bos_token": "x"}, "is not a variable that clients may set"),
    ],
)
def test_template_variables_of_clients_are_short_and_not_the_models_own(kwargs: dict[str, object], words: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}
    with pytest.raises(RequestError, match=words):
        parse_body(ChatBody, json.dumps(body).encode())
