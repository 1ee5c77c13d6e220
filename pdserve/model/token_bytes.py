"""The bytes of tokens, by the decoder in a tokenizer.json: byte-level BPE or SentencePiece BPE."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

TokenBytes = Callable[[str], bytes]


def token_decoder(tokenizer: Fields) -> tuple[TokenBytes, bool]:
    """The function from tokens to bytes, and whether a text's first space is removed. Raises `SetupError`."""
    steps = list(_steps(tokenizer.object("decoder")))
    kinds = [step.text("type", "none") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaces = "Metaspace" in kinds or any(_replaces_space(step) for step in steps)
    if not replaces or set(kinds) - known or not all(_is_as_expected(step) for step in steps):
        raise SetupError(
            f"{tokenizer.where}: decoder {' + '.join(kinds)} is not supported; supported: ByteLevel, and SentencePiece"
            " (Metaspace, or Replace of ▁ with ByteFallback, Fuse and Strip)."
        )
    strips = any(
        step.text("type") == "Strip"
        or (step.text("type") == "Metaspace" and step.text("prepend_scheme", "") != "never")
        for step in steps
    )
    return (_sentencepiece_with_bytes if "ByteFallback" in kinds else _sentencepiece), strips


def _steps(decoder: Fields) -> Iterator[Fields]:
    """The decoder itself, or the decoders of a sequence."""
    nested = decoder.raw("decoders")
    if decoder.text("type", "") != "Sequence" or not isinstance(nested, list):
        yield decoder
        return
    for step in nested:
        yield from _steps(Fields({"step": step}, decoder.where).object("step"))


def _replaces_space(step: Fields) -> bool:
    return step.raw("pattern") == {"String": _SPACE} and step.raw("content") == " "


def _is_as_expected(step: Fields) -> bool:
    match step.text("type"):
        case "Replace":
            return _replaces_space(step)
        case "Strip":
            return step.raw("content") == " " and step.raw("start") == 1 and step.raw("stop") == 0
        case "Metaspace":
            return step.raw("replacement") == _SPACE
        case _:
            return True


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for: its own code, or for unprintable bytes U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        # An added token is plain text.
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def _sentencepiece_with_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _sentencepiece(token)
