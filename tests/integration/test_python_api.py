"""The Python API with a real cluster: the bits of the HTTP API, over `base_url` and on a cluster of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve import LLM, AsyncLLM, CompletionOutput, PoolingParams, RequestOutput, SamplingParams
from tests.arch.documents import code_blocks
from tests.support.cluster import MODEL, Cluster
from tests.support.default_model import EXACT_DTYPE

ROOT = Path(__file__).parents[2]
LONG = "The river runs through the old town and under five bridges. " * 12
PROMPTS = ["The capital of France is", LONG]
USER = {"role": "user", "content": "Name three colors. " * 20}
CASES = [
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 3},
    {"temperature": 1.0, "max_tokens": 12, "seed": 11, "n": 3, "logprobs": 2, "top_p": 0.9},
    {"temperature": 0.8, "max_tokens": 24, "seed": 5, "stop": ["e", "\n"], "include_stop_str_in_output": True},
]
#: As in the fixtures of clusters.
OWN: dict[str, Any] = {"dtype": EXACT_DTYPE, "kv_cache_memory": "128MiB", "prefill": 0}


@pytest.fixture
def llm(cluster: Cluster) -> Iterator[LLM]:
    with LLM(base_url=cluster.base_url) as opened:
        yield opened


def _shown(output: CompletionOutput) -> tuple[Any, ...]:
    """Everything that a completion over HTTP shows, too."""
    logprobs = None
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = [entry[token_id].logprob for token_id, entry in pairs]
    return (output.index, output.text, output.token_ids, output.finish_reason, output.stop_reason, logprobs)


def _over_http(cluster: Cluster, prompt: str, fields: dict[str, Any]) -> list[tuple[Any, ...]]:
    known = {"temperature", "max_tokens", "seed", "n", "logprobs", "top_p", "stop"}
    more = {name: value for name, value in fields.items() if name not in known} | {"return_token_ids": True}
    # vLLM's default, where a model may have another one.
    sent = {"top_p": 1.0} | {name: value for name, value in fields.items() if name in known}
    with cluster.client() as client:
        answer: Any = client.completions.create(model=MODEL, prompt=prompt, extra_body=more, **sent)
    return [
        (
            each.index,
            each.text,
            each.token_ids,
            each.finish_reason,
            each.stop_reason,
            None if each.logprobs is None else each.logprobs.token_logprobs,
        )
        for each in answer.choices
    ]


@pytest.mark.parametrize("fields", CASES, ids=["greedy", "sampled", "stopped"])
def test_outputs_are_those_of_the_http_api(cluster: Cluster, llm: LLM, fields: dict[str, Any]) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(**fields), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [_shown(each) for each in output.outputs] == _over_http(cluster, prompt, fields)


def test_a_seed_of_the_llm_can_be_repeated_over_http(cluster: Cluster, llm: LLM) -> None:
    fields = {"temperature": 1.0, "max_tokens": 12}
    for output in llm.generate(PROMPTS, SamplingParams(**fields), use_tqdm=False):
        assert output.prompt is not None
        again = _over_http(cluster, output.prompt, fields | {"seed": output.seed})
        assert [_shown(each) for each in output.outputs] == again


def test_prompts_are_scored_as_over_http(cluster: Cluster, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    [output] = llm.generate("The capital of France is", params, use_tqdm=False)
    with cluster.client() as client:
        answer: Any = client.completions.create(
            model=MODEL,
            prompt="The capital of France is",
            temperature=0,
            max_tokens=2,
            extra_body={"prompt_logprobs": 1},
        )
    assert output.prompt_logprobs is not None
    shown = [
        None if entry is None else {str(token_id): asdict(each) for token_id, each in entry.items()}
        for entry in output.prompt_logprobs
    ]
    assert shown == answer.choices[0].prompt_logprobs
    assert len(shown) == len(output.prompt_token_ids)


def test_a_chat_is_that_of_the_http_api(cluster: Cluster, llm: LLM) -> None:
    [output] = llm.chat([USER], SamplingParams(temperature=0.7, seed=3, max_tokens=16, top_p=1.0), use_tqdm=False)
    with cluster.client() as client:
        answer: Any = client.chat.completions.create(
            model=MODEL,
            messages=[USER],  # type: ignore[list-item]
            temperature=0.7,
            seed=3,
            max_tokens=16,
            top_p=1.0,
            extra_body={"return_token_ids": True},
        )
    assert output.outputs[0].text == answer.choices[0].message.content
    assert output.outputs[0].token_ids == answer.choices[0].token_ids
    assert output.prompt_token_ids == answer.prompt_token_ids


def test_embeddings_and_scores_are_those_of_the_http_api(cluster: Cluster, llm: LLM) -> None:
    params = PoolingParams(pooling="mean", dimensions=64)
    embedded = llm.embed(PROMPTS, pooling_params=params, use_tqdm=False)
    scored = llm.score(PROMPTS[0], PROMPTS, pooling_params=PoolingParams(pooling="mean"), use_tqdm=False)
    with cluster.client() as client:
        answer = client.embeddings.create(
            model=MODEL, input=PROMPTS, dimensions=64, extra_body={"pooling": "mean"}, encoding_format="float"
        )
        body = {"model": MODEL, "text_1": PROMPTS[0], "text_2": PROMPTS, "pooling": "mean"}
        scores: Any = client.post("/score", body=body, cast_to=object)
    assert [each.outputs.embedding for each in embedded] == [each.embedding for each in answer.data]
    assert sum(len(each.prompt_token_ids) for each in embedded) == answer.usage.prompt_tokens
    assert [each.outputs.score for each in scored] == [each["score"] for each in scores["data"]]


async def test_a_stream_ends_with_the_same_output(cluster: Cluster) -> None:
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, logprobs=2)
    async with AsyncLLM(base_url=cluster.base_url) as llm:
        outputs = [output async for output in llm.generate(LONG, params)]
    fields = {"temperature": 1.0, "seed": 11, "n": 3, "max_tokens": 12, "logprobs": 2}
    assert [_shown(each) for each in outputs[-1].outputs] == _over_http(cluster, LONG, fields)
    assert outputs[-1].finished


def test_a_cluster_of_its_own_gives_the_same_and_leaves_nothing(
    cluster: Cluster, shared_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs(llm: LLM) -> Sequence[RequestOutput]:
        params = [SamplingParams(max_tokens=12, logprobs=1), SamplingParams(max_tokens=12, n=2, temperature=0.5)]
        return llm.generate(PROMPTS, params, use_tqdm=False)

    with LLM(base_url=cluster.base_url) as llm:
        expected = outputs(llm)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match="the script fails"), LLM(shared_model, **OWN) as own:
        got = outputs(own)
        assert set(psutil.Process().children(recursive=True)) > before
        raise RuntimeError("the script fails")
    assert [[_shown(each) for each in output.outputs] for output in got] == [
        [_shown(each) for each in output.outputs] for output in expected
    ]
    assert set(psutil.Process().children(recursive=True)) <= before
    assert [path.name for path in tmp_path.iterdir()] == ["pdserve"]


@pytest.mark.parametrize(("page", "shown"), [("README.md", "Water boils at"), ("docs/python.md", "Paris")])
def test_examples_of_documents_run(
    eloquent: Cluster, capsys: pytest.CaptureFixture[str], page: str, shown: str
) -> None:
    default = "http://127.0.0.1:8000"
    [code] = [each for each in code_blocks(page, "python") if "from pdserve" in each and default in each]
    exec(compile(code.replace(default, eloquent.base_url), page, "exec"), {})
    assert shown in capsys.readouterr().out


def test_the_example_runs(eloquent: Cluster, tmp_path: Path) -> None:
    questions = tmp_path / "questions"
    questions.write_text("What is the capital of France?\nHow many legs has a spider?\n")
    command = [sys.executable, "docs/examples/offline.py", "--base-url", eloquent.base_url, "--questions", questions]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert rows[0]["answer"] == "The capital of France is Paris."
    assert [row["question"] for row in rows] == questions.read_text().splitlines()
    assert {row["geography"] for row in rows} <= {"yes", "no"}
