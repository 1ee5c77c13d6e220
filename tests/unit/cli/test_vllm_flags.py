"""A command line of `vllm serve` works with `pdserve up`, or is refused with advice."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pdserve.base.config import load
from pdserve.base.errors import SetupError
from pdserve.cli.up_config import UpConfig
from pdserve.cli.vllm_flags import FLAGS, Accepted, Refused, Renamed, translate

ROOT = Path(__file__).parents[3]
#: The flags of `vllm serve` that people use most, with a value each takes.
POPULAR = {
    "--host": "0.0.0.0",
    "--port": "8100",
    "--api-key": "one",
    "--ssl-certfile": "cert.pem",
    "--ssl-keyfile": "key.pem",
    "--ssl-ca-certs": "ca.pem",
    "--ssl-cert-reqs": "2",
    "--scheduling-policy": "priority",
    "--allowed-origins": '["https://chat.example.com"]',
    "--served-model-name": "m",
    "--tensor-parallel-size": "1",
    "--data-parallel-size": "2",
    "--max-model-len": "4096",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "256",
    "--gpu-memory-utilization": "0.8",
    "--dtype": "bfloat16",
    "--kv-cache-dtype": "auto",
    "--quantization": "int8",
    "--block-size": "16",
    "--download-dir": "/models",
    "--load-format": "auto",
    "--seed": "0",
    "--enforce-eager": None,
    "--enable-prefix-caching": None,
    "--enable-chunked-prefill": None,
    "--trust-remote-code": None,
    "--disable-log-requests": None,
    "--generation-config": "auto",
}


def up(*argv: str) -> UpConfig:
    return load(UpConfig, "up", translate(argv).arguments)


def test_twenty_popular_flags_are_accepted_together() -> None:
    argv = [word for flag, value in POPULAR.items() for word in (flag, value) if word is not None]
    config = up("org/model", *argv)
    assert len(POPULAR) >= 20
    assert (config.model, config.port, config.decode, config.cache_dir) == (("org/model",), 8100, 2, "/models")
    assert (config.enforce_eager, config.quantization, config.max_num_seqs) == (True, "int8", 8)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model", "org/m"], ["org/m"]),
        (["--model=org/m", "-tp", "2"], ["org/m", "--tensor-parallel-size", "2"]),
        (["--tensor-parallel-size=2"], ["--tensor-parallel-size=2"]),
        (["--uvicorn-log-level=warning"], ["--log-level", "warning"]),
        (["--enable_prefix_caching", "--port", "1"], ["--port", "1"]),
        (["--prefill", "2"], ["--prefill", "2"]),
    ],
)
def test_flags_are_renamed_dropped_or_passed_on(argv: list[str], expected: list[str]) -> None:
    assert translate(argv).arguments == expected


def test_a_flag_that_changes_nothing_is_noted() -> None:
    [note] = translate(["--enable-chunked-prefill"]).notes
    assert note.startswith("--enable-chunked-prefill: prompts are always computed in chunks")


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        (["--kv-transfer-config", "{}"], "--prefill, --decode and --transport"),
        (["--revision=secret"], "ORG/NAME@REVISION"),
        (["--pipeline-parallel-size", "2"], "--tensor-parallel-size"),
        (["--load-format", "dummy"], "auto, safetensors, gguf"),
        (["--seed"], "needs a value"),
    ],
)
def test_what_cannot_be_done_is_refused_with_advice_and_without_the_value_of_a_key(
    argv: list[str], advice: str
) -> None:
    with pytest.raises(SetupError, match=re.escape(advice)) as raised:
        translate(argv)
    assert "secret" not in str(raised.value)


def test_every_new_name_is_a_flag_of_up() -> None:
    ours = {f"--{one.name.replace('_', '-')}" for one in dataclasses.fields(UpConfig)}
    assert {known.name for known in FLAGS.values() if isinstance(known, Renamed) and known.name} <= ours
    assert not (ours - {"--model"}) & set(FLAGS)


def test_the_page_lists_every_flag() -> None:
    page = (ROOT / "docs/from-vllm.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(-[^`]+)`", page, flags=re.MULTILINE))
    assert rows == set(FLAGS) | {flag for flag in POPULAR if flag not in FLAGS}
    assert {type(known) for known in FLAGS.values()} == {Renamed, Accepted, Refused}
