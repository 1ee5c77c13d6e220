"""A model directory without weights, which is all a router needs. Token id b is byte b; special tokens follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAME = "tiny"
MAX_POSITIONS = 256
#: The 256 bytes and the two special tokens.
VOCAB_SIZE = 258
START, END = 256, 257

_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "<|start|>{{ message['role'] }}:{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}{{ mood }}"
)


def byte_alphabet() -> list[str]:
    """The character for each byte in byte-level vocabularies, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokens_of(text: str) -> list[int]:
    """Token ids of a text."""
    return list(text.encode())


def write_model(directory: Path, *, generation: dict[str, object] | None = None) -> Path:
    """Writes the files that the router reads, and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eos_token_id": END,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    return write_model(tmp_path_factory.mktemp("model") / NAME)
