"""Texts by a schema: random ones that its grammar allows, and changes of valid ones."""

from __future__ import annotations

import copy
import json
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from pdserve.model.grammar import Grammar, GrammarFailed, GrammarVocabulary
from pdserve.model.tokenizer import Tokenizer
from tests.unit.model.vocabularies import byte_level

#: Tokens behind which a walk takes what ends it, and behind which it is given up.
_MANY_TOKENS, _MAX_TOKENS = 60, 600
_ENDING = b'"]}0n1t f,:'
_OTHER_VALUES: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**9, "", "zzz", "é" * 40, [], [0] * 9, {}, {"zzz": 1})


class Texts:
    """A vocabulary of bytes, by which grammars are read."""

    def __init__(self) -> None:
        tokenizer = byte_level()
        self._end = tokenizer.token_to_id("<|end|>")
        own = Tokenizer(tokenizer, (self._end,))
        self.vocabulary = GrammarVocabulary(own, tokenizer.get_vocab_size())
        self._bytes = [own.token_bytes(token) for token in range(tokenizer.get_vocab_size())]
        self._token = {value: token for token, value in enumerate(self._bytes) if len(value) == 1}
        self._ending = [self._end, *(self._token[bytes([value])] for value in _ENDING)]

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether the grammar allows the text and then its end."""
        tokens = array("q", [self._token[bytes([value])] for value in text.encode()])
        try:
            bits = grammar.start().allowed(tokens, 0)
        except GrammarFailed:
            return False
        return bool(bits[self._end // 32] >> (self._end % 32) & 1)

    def walk(self, grammar: Grammar, rng: random.Random) -> str | None:
        """A text from random tokens that may follow each other; None: it found no end."""
        state, output = grammar.start(), array("q")
        while len(output) < _MAX_TOKENS:
            allowed = np.flatnonzero(np.unpackbits(state.allowed(output, 0).view(np.uint8), bitorder="little"))
            token = self._chosen(set(allowed.tolist()), len(output), rng)
            if token == self._end:
                return b"".join(self._bytes[each] for each in output).decode()
            output.append(token)
        return None

    def _chosen(self, allowed: set[int], length: int, rng: random.Random) -> int:
        ending = [token for token in self._ending if token in allowed]
        if ending and (length > _MANY_TOKENS or rng.random() < 0.3):
            return ending[0] if length > _MANY_TOKENS else rng.choice(ending)
        return rng.choice(sorted(allowed))


def changed(value: Any, rng: random.Random) -> Any:
    """A value that differs from this one in one position, or has something more or less there."""
    path = rng.choice(list(_positions(value)))
    other = rng.choice([rng.choice(_OTHER_VALUES), *_near(_at(value, path), rng)])
    if not path:
        return other
    made = copy.deepcopy(value)
    _at(made, path[:-1])[path[-1]] = other
    return made


def _near(held: Any, rng: random.Random) -> Iterator[Any]:
    if isinstance(held, dict):
        yield {**held, "other": rng.choice(_OTHER_VALUES)}
        yield {**held, rng.choice(("x-1", "12", "u_id", "ka")): rng.choice(_OTHER_VALUES)}
        yield from ({key: each for key, each in held.items() if key != name} for name in held)
    elif isinstance(held, list):
        yield [*held, rng.choice(_OTHER_VALUES)]
        yield held[:-1]
    elif isinstance(held, str):
        yield from (held + "a", held[1:], held * 5, held.upper(), held + "\n")
    elif isinstance(held, int | float) and not isinstance(held, bool):
        yield from (held + 1, held - 1, held * 1000, -held, held + 0.05)


def _positions(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from _positions(child, (*path, name))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def spellings(value: Any, rng: random.Random) -> Iterator[str]:
    """The value as JSON, and texts that are similar: with escapes, equal names, other numbers."""
    yield json.dumps(value, ensure_ascii=False)
    text = json.dumps(value, separators=(",", ":"))
    yield text
    if isinstance(value, dict) and value:
        name = rng.choice(list(value))
        other = json.dumps(rng.choice(_OTHER_VALUES))
        escaped = "".join(f"\\u{ord(each):04x}" for each in name if ord(each) < 0x10000)
        yield f'{text[:-1]}, "{escaped}": {other}}}'
        yield f"{text[:-1]}, {json.dumps(name)}: {other}}}"
        yield f'{{"{escaped}": {other}, {text[1:]}'
    yield text.replace("1", "1.0", 1)
    yield text.replace("1", "1e1", 1)
