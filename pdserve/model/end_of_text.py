"""Token ids that end a text: those that the configs list, and the tokenizer's own. No torch."""

from __future__ import annotations

from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

#: Far above the size of a real tokenizer.json.
MAX_TOKENIZER_BYTES = 128 << 20


def end_of_text_ids(model_dir: Path, config: Fields) -> tuple[int, ...]:
    """The ids of a model directory, of which `config` is the config.json. Raises `SetupError`.

    vLLM ends texts at the tokenizer's eos_token too. Finetunes with a chat format of their own often change only that.
    """
    listed = listed_ids(config, Fields.read_optional(model_dir / "generation_config.json"))
    own = _tokenizers_id(model_dir)
    return listed if own is None or own in listed else (*listed, own)


def listed_ids(config: Fields, generation: Fields) -> tuple[int, ...]:
    """The ids in generation_config.json and config.json. Raises `SetupError`."""
    return tuple(dict.fromkeys([*generation.token_ids("eos_token_id"), *config.token_ids("eos_token_id")]))


def special_token(config: Fields, name: str) -> str | None:
    """A special token of tokenizer_config.json, which is a string or an object with the text in `content`."""
    value = config.raw(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tokenizers_id(model_dir: Path) -> int | None:
    """The id of the tokenizer's `eos_token`; None when there is none, or it is no added token."""
    config = Fields.read_optional(model_dir / "tokenizer_config.json")
    token = special_token(config, "eos_token")
    if token is None:
        return None
    if config.has("added_tokens_decoder"):
        return _in_config(config.object("added_tokens_decoder"), token)
    path = model_dir / "tokenizer.json"
    if not path.exists():
        return None
    added = Fields.read(path, MAX_TOKENIZER_BYTES).raw("added_tokens")
    entries = added if isinstance(added, list) else []
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("content") == token]
    ids = Fields(found[0], f"{path}: added_tokens").token_ids("id") if found else ()
    return ids[0] if ids else None


def _in_config(added: Fields, token: str) -> int | None:
    for name in added.names():
        entry = added.raw(name)
        if isinstance(entry, dict) and entry.get("content") == token:
            if not (name.isascii() and name.isdecimal() and len(name) < 10):
                raise SetupError(f"{added.where} has the id {name!r}, but must have token ids. Is the file damaged?")
            return int(name)
    return None
