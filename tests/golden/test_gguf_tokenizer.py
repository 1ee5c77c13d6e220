"""The tokenizer built from a GGUF vocabulary compared with that of transformers for the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.model.fetch.gguf_file import GgufFile
from pdserve.model.fetch.gguf_tokenizer import build_tokenizer
from tests.golden.prompts import SHORT_PROMPTS, long_prompt
from tests.support.fetch_model import default_gguf_file
from tests.support.lazily import transformers

pytestmark = pytest.mark.slow

TEXTS = (
    *SHORT_PROMPTS,
    long_prompt(300),
    "",
    " leading and trailing ",
    "1234567890 12 3.14 1e-5",
    "don't we'll I'M they'VE",
    "a\u0301 é \u00a0 \u200b \ufeff x",
    "日本語テキスト، עברית, العربية, ไทย, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "<|im_start|><|im_end|><|endoftext|> <repo_name>",
    "\x00\x01\x7f",
)


def test_every_text_is_encoded_as_by_transformers(tmp_path: Path) -> None:
    # transformers looks for more files beside it.
    path = tmp_path / "model.gguf"
    path.symlink_to(default_gguf_file())
    ours = build_tokenizer(GgufFile(path).metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text), text
        ids = ours.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
