"""Token ids that end a text: those that the configs list, and the tokenizer's own. No torch."""

from __future__ import annotations

from pathlib import Path

from pdserve.model.fields import Fields
from pdserve.model.tokenizer_settings import TokenizerSettings, token_id

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
    if not path.exists():
        return None
    tokenizer = Fields.read(path, MAX_TOKENIZER_BYTES)
    found = token_id({name: tokenizer.raw(name) for name in ("added_tokens", "model")}, token)
    ids = Fields({"id": found}, f"{path}: {token}").token_ids("id")
    return ids[0] if ids else None
