"""Fields, paths and metrics in documents are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pdserve.worker.serve.metrics import WorkerMetrics
from router_svc.api.anthropic.errors import type_of
from router_svc.api.anthropic.schema import MessagesBody
from router_svc.api.decisions.schema import DecisionBody
from router_svc.api.fields import IGNORED, UNSUPPORTED
from router_svc.api.ollama.schema import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from router_svc.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from router_svc.api.pooling.schema import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from router_svc.api.reference.operation import ALWAYS
from router_svc.api.reference.operations import OPERATIONS
from router_svc.api.responses.schema import ResponsesBody
from router_svc.records.metrics import RouterMetrics
from tests.arch.documents import DOCUMENTS, ROOT, names_in_first_column, path_id, read, section, table_rows


def test_every_field_of_the_api_is_documented() -> None:
    both = set(names_in_first_column(section("docs/http-api.md", "Fields of both generating endpoints")))
    assert both == set(GenerationBody.model_fields)
    for heading, body in (("Chat", ChatBody), ("Completions", CompletionBody)):
        own = set(names_in_first_column(section("docs/http-api.md", heading)))
        assert own == set(body.model_fields) - both


def test_every_field_of_responses_is_documented() -> None:
    assert set(names_in_first_column(section("docs/responses.md", "Fields"))) == set(ResponsesBody.model_fields)


def test_every_field_of_messages_is_documented() -> None:
    assert set(names_in_first_column(section("docs/messages.md", "Fields"))) == set(MessagesBody.model_fields)


def test_every_field_and_option_of_ollama_is_documented() -> None:
    fields = OllamaChatBody.model_fields.keys() | OllamaGenerateBody.model_fields.keys()
    assert set(names_in_first_column(section("docs/ollama.md", "Fields"))) == fields
    assert set(names_in_first_column(section("docs/ollama.md", "Options"))) == set(OllamaOptions.model_fields)


def test_every_field_of_embeddings_is_documented() -> None:
    fields = set(names_in_first_column(section("docs/embeddings.md", "Fields")))
    assert fields == set(EmbeddingBody.model_fields)
    fields = set(names_in_first_column(section("docs/embeddings.md", "Scores and ranks"))) - {"/v1/score", "/v1/rerank"}
    assert fields == (set(ScoreBody.model_fields) | set(RerankBody.model_fields)) - set(PoolingBody.model_fields)


def test_every_field_of_decisions_is_documented() -> None:
    assert set(names_in_first_column(section("docs/classification.md", "Fields"))) == set(DecisionBody.model_fields)


def test_every_type_of_errors_of_messages_is_documented() -> None:
    rows = [row for row in table_rows(section("docs/messages.md", "Errors")) if row[0][0].isdigit()]
    documented = {int(status): row[1].strip("`") for row in rows for status in row[0].split(", ")}
    assert documented == {status: type_of(status) for status in documented}
    forms = (OPERATIONS["POST", path] for path in ("/v1/messages", "/v1/messages/count_tokens"))
    assert set(documented) == {status for form in forms for status in (*ALWAYS, *form.errors)} | {401, 405}


@pytest.mark.parametrize(
    ("heading", "names"), [("Fields without effect", set(IGNORED)), ("Fields that are refused", set(UNSUPPORTED))]
)
def test_ignored_and_refused_fields_are_documented(heading: str, names: set[str]) -> None:
    *_, listed = section("docs/http-api.md", heading).strip().split("\n\n")
    assert set(re.findall(r"`(\w+)`", listed)) == names


def test_every_path_is_documented() -> None:
    route = re.compile(r'web\.(get|post|delete)\("([^"]+)"')
    sources = [*(ROOT / "router_svc").rglob("*.py"), ROOT / "pdserve/net/admin.py"]
    found = {match for path in sources for match in route.findall(path.read_text(encoding="utf-8"))}
    # Pages, and rows of the table of endpoints.
    for path in ("/console", "/docs"):
        assert f'StaticPage("{path}", ' in "".join(source.read_text(encoding="utf-8") for source in sources)
        found |= {("get", path), ("get", f"{path}/"), ("get", f"{path}/{{name}}")}
    found |= {
        ("post", path) for path in re.findall(r'Endpoint\(name="(/[^"]+)"', read("router_svc/api/generations.py"))
    }
    exist = {f"{method.upper()} {path.replace(':.+', '')}" for method, path in found}
    assert set(names_in_first_column(read("docs/http-api.md").split("\n## ")[0])) == exist


def _sources(path: str) -> dict[str, str]:
    """Names and types of the sources made in a module. The objects that count own them, not the metrics class."""
    kinds = {"CounterSource": "counter", "GaugeSource": "gauge"}
    calls = [node for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Call)]
    return {
        f"pdserve_{ast.literal_eval(keyword.value)}": kinds[ast.unparse(call.func)]
        for call in calls
        if ast.unparse(call.func) in kinds
        for keyword in call.keywords
        if keyword.arg == "name"
    }


@pytest.mark.parametrize(
    ("heading", "metrics", "made_in"),
    [
        (
            "Router",
            RouterMetrics(model_name="m"),
            (
                "router_svc/service.py",
                "router_svc/model_state.py",
                "router_svc/api/intake.py",
                "kvtransfer/index/prefix_mirror.py",
                "router_svc/records/request_store.py",
                "router_svc/records/usage_store.py",
                "router_svc/records/request_store.py",
                "router_svc/records/stream_logs.py",
                "router_svc/records/redis_memory.py",
                "pdserve/observe/tracing/setup.py",
            ),
        ),
        (
            "Workers",
            WorkerMetrics(model_name="m", tier="decode"),
            (
                "decode_svc/peer_transfers.py",
                "pdserve/worker/serve/announce.py",
                "pdserve/worker/serve/step_metrics.py",
                "pdserve/observe/tracing/setup.py",
            ),
        ),
    ],
)
def test_every_metric_is_documented_and_every_documented_metric_exists(
    heading: str, metrics: RouterMetrics | WorkerMetrics, made_in: tuple[str, ...]
) -> None:
    families = {family.name: family.type for family in metrics.registry.collect()}
    exported = {name: kind for name, kind in families.items() if name.startswith("pdserve_")}
    for path in made_in:
        exported |= _sources(path)
    rows = table_rows(section("docs/operations/metrics.md", heading))
    assert {row[0].strip("`"): row[1] for row in rows} == exported


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_id)
def test_every_mentioned_metric_exists(path: Path) -> None:
    known = {row[0].strip("`") for row in table_rows(read("docs/operations/metrics.md"))}
    for name in re.findall(r"\bpdserve_[a-z0-9_]*[a-z0-9]", path.read_text(encoding="utf-8")):
        assert re.sub(r"_(total|bucket|sum|count)$", "", name) in known | {name} & known, name
