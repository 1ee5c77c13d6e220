"""Bodies that broke other servers are refused by the schema, before anything is made of them."""

from __future__ import annotations

import base64
import json
import tracemalloc
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Le

from pdserve.base.errors import RequestError
from router_svc.api.body import Body
from router_svc.api.fields import UNSUPPORTED
from router_svc.api.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router_svc.api.parse import parse_body
from router_svc.api.sampling import MAX_SEQUENCES

BODIES: tuple[tuple[type[Body], dict[str, object]], ...] = (
    (CompletionBody, {"model": "m", "prompt": "x"}),
    (ChatBody, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
)
#: Numbers at which a narrower type overflows, wraps around or changes its sign.
EDGES = [
    *(
        sign * (2**bits) + off
        for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64, 128)
        for sign in (1, -1)
        for off in (-1, 0)
    ),
    -1,
    10**30,
]


def _integer_bounds(annotation: object, metadata: tuple[object, ...] = ()) -> tuple[int | None, int | None] | None:
    """Lowest and highest value of an integer field; None for a field of another type."""
    if get_origin(annotation) in (Union, UnionType):
        found = [_integer_bounds(each, metadata) for each in get_args(annotation)]
        return next((each for each in found if each is not None), None)
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _integer_bounds(inner, (*metadata, *more))
    if annotation is not int:
        return None
    lowest = next((int(str(each.ge)) for each in metadata if isinstance(each, Ge)), None)
    return lowest, next((int(str(each.le)) for each in metadata if isinstance(each, Le)), None)


def _integer_fields(cls: type[Body]) -> dict[str, tuple[int | None, int | None]]:
    bounds = {
        name: _integer_bounds(field.annotation, tuple(field.metadata)) for name, field in cls.model_fields.items()
    }
    return {name: found for name, found in bounds.items() if found is not None}


@pytest.mark.parametrize(("cls", "body"), BODIES)
def test_every_integer_has_two_bounds_and_is_refused_beyond_them(cls: type[Body], body: dict[str, object]) -> None:
    """CVE-2026-21869: one negative integer was an index. Fails for a field without `Ge` or `Le`."""
    fields = _integer_fields(cls)
    assert {"n", "max_tokens", "min_tokens", "top_k", "seed", "priority"} <= fields.keys()
    for name, (lowest, highest) in fields.items():
        assert lowest is not None, name
        assert highest is not None, name
        assert -(2**63) <= lowest <= highest < 2**63, name
        for value in EDGES:
            if not lowest <= value <= highest:
                with pytest.raises(RequestError) as refused:
                    parse_body(cls, json.dumps(body | {name: value}).encode())
                assert refused.value.param == name, value


@pytest.mark.parametrize(("cls", "body"), BODIES)
@pytest.mark.parametrize("n", [10**6, 2**31, 2**63, 10**30])
def test_an_absurd_n_is_refused_before_anything_is_made(cls: type[Body], body: dict[str, object], n: int) -> None:
    """CVE-2026-34756: a huge n took all memory before it was scheduled. Fails without the bound of `n`."""
    text = json.dumps(body | {"n": n}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="less than or equal to 128"):
            parse_body(cls, text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert MAX_SEQUENCES == 512


#: What made servers unpickle, connect, compile or run something.
HOSTILE_VALUES = (
    base64.b64encode(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.").decode(),
    "(a+)+$" * 100,
    "{{ ''.__class__.__mro__ }}",
    "http://169.254.169.254/latest/meta-data",
    -1,
    2**64,
    1.5,
    True,
    [[[]]],
    ["x"] * 200,
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"remote_host": "10.0.0.7", "remote_port": 1},
    {"__reduce__": ["os.system", ["true"]]},
)


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_an_unsupported_field_is_refused_whatever_its_value(field: str) -> None:
    """CVE-2025-62164 (`prompt_embeds`), CVE-2025-61620 (`chat_template`). Fails when one is moved to `IGNORED`."""
    for cls, body in BODIES:
        for value in HOSTILE_VALUES:
            if value in UNSUPPORTED[field]:
                continue
            with pytest.raises(RequestError) as refused:
                parse_body(cls, json.dumps(body | {field: value}).encode())
            assert refused.value.param is not None
            assert refused.value.param.startswith(field)
            assert len(str(refused.value)) < 500


@pytest.mark.parametrize("field", ["response_format", "guided_json", "guided_grammar", "structured_outputs", "tools"])
def test_nesting_of_any_depth_ends_in_a_refusal(field: str) -> None:
    """llama.cpp's parser of grammars overflowed its stack. Fails without the bounds in `structure` and `parse`."""
    for depth in (65, 199, 201, 30_000, 100_000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"model": "m", "prompt": "x", "%b": %b}' % (field.encode(), nested)
        with pytest.raises(RequestError, match=r"nested|not valid JSON|objects, lists and keys"):
            parse_body(CompletionBody, body)


MEDIA: tuple[dict[str, object], ...] = (
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_image", "image_url": "http://127.0.0.1/"},
    {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1/"}},
    {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    {"type": "text", "text": "x", "image_url": "http://127.0.0.1/"},
)


@pytest.mark.parametrize("content", MEDIA)
def test_media_are_refused_without_being_fetched_or_decoded(content: dict[str, object]) -> None:
    """CVE-2025-6242, CVE-2026-24779, CVE-2026-33626 (URLs of the inner network), CVE-2026-22773, CVE-2026-22778 and
    CVE-2026-5497 (decoders and what their errors show). Fails when `_flat_content` lets other parts pass.
    """
    text = json.dumps({"model": "m", "messages": [{"role": "user", "content": [content]}]}).encode()
    for cls in (ChatBody, TokenizeBody):
        with pytest.raises(RequestError) as refused:
            parse_body(cls, text)
        assert "0x" not in str(refused.value)
        assert "http" not in str(refused.value)


def test_token_ids_are_numbers_only() -> None:
    for wrong in ([True], ["1"], [1.0], [None], [[1]], {"a": 1}, "x", b"x".hex()):
        with pytest.raises(RequestError):
            parse_body(DetokenizeBody, json.dumps({"tokens": wrong}).encode())
