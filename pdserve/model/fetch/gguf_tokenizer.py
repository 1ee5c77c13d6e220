"""Builds tokenizer.json from the vocabulary in a GGUF file. No torch.

Supports byte-level BPE ("gpt2") with the pre-tokenizers below, and SentencePiece BPE ("llama").
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields
from pdserve.model.library_errors import library_errors

#: Sum of the squares of tokens' lengths, the work to find their merges: far above that of real vocabularies.
_MAX_SQUARES = 1 << 28
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#: Values of `tokenizer.ggml.pre`, by how they split text; here digits are split into groups of up to this size.
_SPLIT_DIGITS = {"llama-bpe": 3, "llama3": 3, "llama-v3": 3, "smaug-bpe": 3, "qwen2": 1}
_GPT2 = ("gpt-2", "gpt2", "default")
_DIGITS_THEN_GPT2 = ("smollm", "refact", "starcoder", "command-r")
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]


def build_tokenizer(metadata: Fields) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises `SetupError` when its vocabulary is damaged or not supported."""
    vocabulary = _read_vocabulary(metadata)
    with library_errors(lambda reason: SetupError(f"{metadata.where}: the vocabulary is damaged: {reason}.")):
        return _build(metadata, vocabulary)


def _build(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, vocabulary)
        adds_bos = metadata.text("tokenizer.ggml.pre", "default") in _ADDS_BOS
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, vocabulary)
        adds_bos = True
    else:
        raise SetupError(f"{metadata.where}: tokenizer {kind!r} is not supported; supported: gpt2, llama.")
    tokenizer.add_special_tokens(_added(vocabulary, _CONTROL, _UNKNOWN))
    tokenizer.add_tokens(_added(vocabulary, _USER_DEFINED))
    _add_frame(tokenizer, metadata, vocabulary, adds_bos=metadata.flag("tokenizer.ggml.add_bos_token", adds_bos))
    return tokenizer


def special_token(metadata: Fields, name: str) -> str | None:
    """The text of the token with id `tokenizer.ggml.{name}_token_id`."""
    ids = metadata.token_ids(f"tokenizer.ggml.{name}_token_id")
    if not ids:
        return None
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if ids[0] >= len(tokens):
        raise metadata.wrong(f"tokenizer.ggml.{name}_token_id", f"below the number of tokens, {len(tokens)}")
    return tokens[ids[0]]


def _read_vocabulary(metadata: Fields) -> _Vocabulary:
    tokens = list(metadata.texts("tokenizer.ggml.tokens"))
    types = metadata.raw("tokenizer.ggml.token_type")
    types = [1] * len(tokens) if types is None else types
    if not tokens or not isinstance(types, list) or len(types) != len(tokens):
        raise SetupError(f"{metadata.where}: the vocabulary is missing or damaged.")
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise SetupError(f"{metadata.where}: the vocabulary has tokens that are too long; the file is damaged.")
    if len(set(tokens)) != len(tokens):
        raise SetupError(f"{metadata.where}: the vocabulary has a token twice; the file is damaged.")
    return _Vocabulary(tokens=tokens, types=types)


def _byte_level(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    pre = metadata.text("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    pairs = [(merge[0], merge[1]) for merge in merges if len(merge) == 2]
    if len(pairs) != len(merges) or any(a + b not in ids or a not in ids or b not in ids for a, b in pairs):
        raise SetupError(f"{metadata.where}: the merges do not match the vocabulary; the file is damaged.")
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre in _ADDS_BOS))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, metadata.where)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str, where: str) -> PreTokenizer:
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGITS_THEN_GPT2:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name not in _SPLIT_DIGITS:
        supported = ", ".join((*_GPT2, *_DIGITS_THEN_GPT2, *_SPLIT_DIGITS))
        raise SetupError(f"{where}: pre-tokenizer {name!r} is not supported; supported: {supported}.")
    numbers = rf"\p{{N}}{{1,{_SPLIT_DIGITS[name]}}}" if _SPLIT_DIGITS[name] > 1 else r"\p{N}"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    pattern = rf"{_CONTRACTIONS}|{words}|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    scores = metadata.raw("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise SetupError(f"{metadata.where}: the vocabulary has no scores, but the tokenizer 'llama' needs them.")
    if not all(isinstance(score, int | float) for score in scores):
        raise metadata.wrong("tokenizer.ggml.scores", "a list of numbers")
    unknown = special_token(metadata, "unknown")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = models.BPE(
        vocab=ids,
        merges=_merges_from_scores(ids, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if metadata.flag("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All merges in order of their results' scores, best first, since SentencePiece merges the best-scoring pair."""
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _added(vocabulary: _Vocabulary, *types: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=_USER_DEFINED not in types, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in types
    ]


def _add_frame(tokenizer: Tokenizer, metadata: Fields, vocabulary: _Vocabulary, *, adds_bos: bool) -> None:
    """Adds the model's first token and, rarely, its last one around every text."""
    first = special_token(metadata, "bos") if adds_bos else None
    last = special_token(metadata, "eos") if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    pair = [*single, *([f"{first}:1"] if first else []), "$B:1", *([f"{last}:1"] if last else [])]
    frame = {token for token in (first, last) if token is not None}
    special = [(token, vocabulary.tokens.index(token)) for token in sorted(frame)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
