"""The tokenizer of a model's directory. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from pdserve.base.errors import SetupError
from pdserve.base.logs import get_logger
from pdserve.model.end_of_text import MAX_TOKENIZER_BYTES, end_of_text_ids
from pdserve.model.fields import Fields, read_text
from pdserve.model.isolated_encoder import EncoderProcess
from pdserve.model.library_errors import library_errors
from pdserve.model.literal_text import LiteralText
from pdserve.model.tokenizer import Tokenizer
from pdserve.model.tokenizer_cost import unbounded_step
from pdserve.model.tokenizer_settings import TokenizerSettings

log = get_logger(__name__)

#: Keys of tokenizer.json with what is done to texts, besides the model's own part.
_STEPS = ("normalizer", "pre_tokenizer", "post_processor")


def read_tokenizer(model_dir: Path, *, special_tokens_in_text: bool = True, encodes: bool = True) -> Tokenizer:
    """Reads `tokenizer.json`, and the end-of-text tokens from the config files. Raises `SetupError`.

    `special_tokens_in_text`: whether texts of users that spell a special token have it (`Tokenizer.literal`).
    `encodes`: whether texts of users will be encoded. If not, no process is started for it (`Tokenizer.can_encode`).
    """
    path = model_dir / "tokenizer.json"
    text = read_text(path, MAX_TOKENIZER_BYTES)
    ids = end_of_text_ids(model_dir, Fields.read_optional(model_dir / "config.json"))
    literal, isolated = None, None
    with library_errors(lambda reason: SetupError(f"{path} is not a valid tokenizer: {reason}.")):
        read = json.loads(text)
        document = TokenizerSettings.from_dir(model_dir).applied(read)
        if document is not read:
            text = json.dumps(document)
        if not special_tokens_in_text:
            literal, document = LiteralText.prepare(document, ids, str(path))
            text = json.dumps(document)
        if (step := unbounded_step(document)) is not None:
            if encodes:
                log.warning("tokenizer_isolated", tokenizer=path, step=step)
                isolated = EncoderProcess(text, str(path))
            # Even reading would run these steps, on the tokens that are found after normalizing.
            text = json.dumps({**document, **dict.fromkeys(_STEPS)})
        tokenizer = tokenizers.Tokenizer.from_str(text)
    made = Tokenizer(tokenizer, ids, str(path), literal, isolated, can_encode=step is None or isolated is not None)
    if isolated is not None:
        isolated.start()
    return made
