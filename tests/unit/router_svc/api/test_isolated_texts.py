"""Texts of a model whose tokenizer runs in another process."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.model.tokenizer import Tokenizer
from router_svc.api.served_model import ServedModel
from tests.support.tiny_model import model_dir

__all__ = ["model_dir"]


@pytest.mark.parametrize("text", ["", "Hello"])
async def test_no_text_is_encoded_on_the_event_loop(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The event loop would wait for the other process, up to its limit of time."""
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode

    def noted(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    with closing(ServedModel.load(model_dir, "tiny")) as model:
        [expected] = await model.encode([text], add_special_tokens=True)
        assert threads == [threading.main_thread()]
    directory = shutil.copytree(model_dir, tmp_path / "model")
    path = directory / "tokenizer.json"
    step = {"type": "Replace", "pattern": {"Regex": "(a+)+b{99}"}, "content": ""}
    document = json.loads(path.read_text())
    own = document.get("normalizer")
    normalizer = {"type": "Sequence", "normalizers": [step, *([own] if own else [])]}
    path.write_text(json.dumps({**document, "normalizer": normalizer}))
    with closing(ServedModel.load(directory, "tiny")) as model:
        assert await model.encode([text], add_special_tokens=True) == [expected]
        messages = [{"role": "user", "content": text}]
        assert await model.encode_chat(
            messages, add_generation_prompt=True, add_special_tokens=False, template_kwargs={}
        )
    assert threading.main_thread() not in threads[1:]
