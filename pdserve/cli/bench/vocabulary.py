"""Units of synthetic prompts, and counting of tokens, by the model's tokenizer if one is available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import PdserveError
from pdserve.cli.bench.datasets import Pool, TokenPool, WordPool
from pdserve.cli.bench.server import Server
from pdserve.cli.bench.words import WORDS

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Units and token counter. `notice` explains why lengths are not exact; empty when they are."""

    pool: Pool
    count_tokens: Callable[[str], int]
    notice: str = ""


def find_vocabulary(server: Server, model: str, *, tokenizer_dir: str | None, text_only: bool) -> Vocabulary:
    """Token ids from the directory's tokenizer or the server's `/tokenize`; words without either.

    With `text_only` also words, because chats take no token ids. Raises `SetupError` when the directory has no
    tokenizer.
    """
    try:
        encode = _local(tokenizer_dir) if tokenizer_dir is not None else _remote(server, model)
        token_ids = dict.fromkeys(encode(" ".join(WORDS)))
    except PdserveError as error:
        if tokenizer_dir is not None:
            raise
        return Vocabulary(
            pool=WordPool(WORDS),
            count_tokens=lambda text: len(text.split()),
            notice=f"{error} Lengths are in words, about one token each; use --tokenizer DIR for exact ones.",
        )
    if text_only:
        return Vocabulary(
            pool=WordPool(WORDS),
            count_tokens=lambda text: len(encode(text)),
            notice="Chats take text: the lengths of synthetic prompts are in words, about one token each.",
        )
    return Vocabulary(pool=TokenPool(tuple(token_ids)), count_tokens=lambda text: len(encode(text)))


def _remote(server: Server, model: str) -> Encode:
    return lambda text: server.tokenize(text, model)


def _local(directory: str) -> Encode:
    from pdserve.model.tokenizer_file import read_tokenizer

    tokenizer = read_tokenizer(Path(directory))
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
