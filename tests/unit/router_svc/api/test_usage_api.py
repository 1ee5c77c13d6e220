"""The query of `GET /v1/usage`, and its answers as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from datetime import date

import pytest

from pdserve.base.errors import RequestError
from router_svc.api.usage_api import Span, parse_span, render
from router_svc.records.usage import Account, Usage, UsageRow

TODAY = date(2026, 11, 23)


def test_by_default_the_last_30_days_are_answered_as_json() -> None:
    assert parse_span([], TODAY) == Span(first=date(2026, 10, 25), last=TODAY, format="json")
    assert parse_span([("to", "0001-01-02")], TODAY).first == date.min


def test_an_answer_has_at_most_400_days() -> None:
    span = parse_span([("from", "2025-10-20"), ("to", "2026-11-23"), ("format", "csv")], TODAY)
    assert ((span.last - span.first).days + 1, span.format) == (400, "csv")


@pytest.mark.parametrize(
    ("query", "param", "text"),
    [
        ([("from", "2025-10-19")], "from", "are 401 days; the limit is 400"),
        ([("from", "2026-11-24")], "from", "2026-11-24, which is after `to`, 2026-11-23"),
        ([("from", "2026-02-30")], "from", "'2026-02-30'; it must be a day such as"),
        ([("to", "20261123")], "to", "'20261123'"),
        ([("to", "2026-11-23T00:00")], "to", "it must be a day"),
        ([("to", "２０２６-11-23")], "to", "it must be a day"),
        ([("to", "")], "to", "''"),
        ([("from", "9" * 5000)], "from", "'99999999999999999999';"),
        ([("format", "xml")], "format", "'xml'; it must be `json` or `csv`"),
        ([("form", "2026-11-01")], "form", "takes from, to, format"),
        ([("to", "2026-11-01"), ("to", "2026-11-02")], "to", "given twice"),
    ],
)
def test_any_other_query_is_refused(query: list[tuple[str, str]], param: str, text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_span(query, TODAY)
    assert refused.value.param == param
    assert text in str(refused.value)


def test_rows_are_sorted_and_csv_has_the_columns_of_json() -> None:
    usage = Usage(requests=1, input_tokens=10, cached_tokens=4, output_tokens=3)
    rows = [
        UsageRow(day=day, account=Account(tenant=tenant, key_id="k", model='m,"x"'), usage=usage)
        for day, tenant in (("2026-11-23", "a"), ("2026-11-22", "b"), ("2026-11-22", "a"))
    ]
    answer = json.loads(render(parse_span([], TODAY), rows))
    assert (answer["from"], answer["to"]) == ("2026-10-25", "2026-11-23")
    assert [(row["date"], row["tenant"]) for row in answer["data"]] == [
        ("2026-11-22", "a"),
        ("2026-11-22", "b"),
        ("2026-11-23", "a"),
    ]
    text = render(parse_span([("format", "csv")], TODAY), rows).decode()
    lines = text.splitlines()
    assert lines[0] == "date,tenant,key,model,requests,input_tokens,cached_tokens,output_tokens"
    read = [*csv.DictReader(io.StringIO(text))]
    assert read == [{name: str(value) for name, value in row.items()} for row in answer["data"]]
