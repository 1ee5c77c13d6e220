"""Token ids that end a text: those that the configs list, and the tokenizer's own. No torch."""

from __future__ import annotations

from pathlib import Path

from pdserve.model.fields import Fields
from pdserve.model.tokenizer_settings import TokenizerSettings

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


def _tokenizers_id(model_dir: Path) -> int | None:
    """The id of the tokenizer's `eos_token`; None when there is none, or no such token."""
    settings = TokenizerSettings.from_dir(model_dir)
    token = settings.special_tokens.get("eos_token")
    if token is None:
        return None
    if (listed := next((index for index, (text, _) in settings.added.items() if text == token), None)) is not None:
        return listed
    path = model_dir / "tokenizer.json"
    return _in_tokenizer(Fields.read(path, MAX_TOKENIZER_BYTES), token) if path.exists() else None


def _in_tokenizer(tokenizer: Fields, token: str) -> int | None:
    added = tokenizer.raw("added_tokens")
    entries = added if isinstance(added, list) else []
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("content") == token]
    fields = Fields(found[0], f"{tokenizer.where}: added_tokens") if found else _vocabulary(tokenizer, token)
    ids = fields.token_ids("id")
    return ids[0] if ids else None


def _vocabulary(tokenizer: Fields, token: str) -> Fields:
    """The entry of a token that is not added, as added ones have it."""
    model = tokenizer.raw("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    return Fields({"id": found}, f"{tokenizer.where}: vocab")
