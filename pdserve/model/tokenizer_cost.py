"""Whether encoding takes time and memory in proportion to the text, whatever the text is. No torch.

Regular expressions, and normalizers that lengthen a text, come from the model's file. What is known to be harmless is
listed here. Everything else is not, so that nothing depends on recognizing what is harmful.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

#: Characters that all steps may make of one: those of the longest decomposition, as bytes.
_MAX_GROWTH = 72
#: Most steps of a normalizer and a pre-tokenizer together.
_MAX_STEPS = 128
#: Longest text that a step may add before a text or a word, in characters.
_MAX_AFFIX = 64
#: Longest token of a unigram model, which looks for tokens at every position, in characters.
_MAX_UNIGRAM_TOKEN = 512
#: Longest description of a post-processor, which adds tokens to each text, in bytes.
_MAX_POST_PROCESSOR = 65_536

#: Characters that a step makes at most of one character. Unicode's longest decomposition has 18.
_GROWTH = {
    **dict.fromkeys(("NFC", "NFD", "Lowercase"), 4),
    **dict.fromkeys(("NFKC", "NFKD", "BertNormalizer"), 18),
    "ByteLevel": 4,
}
_HARMLESS = {
    "Strip",
    "StripAccents",
    "Nmt",
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Metaspace",
    "Punctuation",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
#: The regular expressions of common models. Each has at most two repetitions in a row, and its alternatives leave no
#: start at which they all fail after reading far.
KNOWN_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            rf"{_CONTRACTIONS}|{_LETTERS}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
            for digits in (r"\p{N}", r"\p{N}{1,3}")
        ),
        rf"{_CASES[0]}|{_CASES[1]}|\p{{N}}|{_SIGNS}|{_SPACES}",
        rf"{_CASES[0]}{_CONTRACTIONS}?|{_CASES[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\d",
    }
)


def unbounded_step(document: Mapping[str, Any]) -> str | None:
    """The first step of encoding whose cost is not known to be bounded, for a log line; None if there is none.

    `document`: the JSON of a tokenizer's file. Wrong types in it raise what they do.
    """
    growth = 1
    steps = (*_steps(document.get("normalizer")), *_steps(document.get("pre_tokenizer")))
    for before, step in enumerate(steps):
        factor = _growth_of(step)
        if factor is None:
            return str(step.get("type"))
        growth *= factor
        if growth > _MAX_GROWTH or before >= _MAX_STEPS:
            return f"{step.get('type')} after {before} steps"
    if len(json.dumps(document.get("post_processor"))) > _MAX_POST_PROCESSOR:
        return "post_processor"
    return _unbounded_model(document["model"])


def _steps(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    waiting = [] if component is None else [component]
    while waiting:
        step = waiting.pop()
        nested = step.get("normalizers") or step.get("pretokenizers") if step.get("type") == "Sequence" else None
        if nested is None:
            yield step
        else:
            waiting.extend(reversed(nested))


def _growth_of(step: Mapping[str, Any]) -> int | None:
    """Characters that the step makes at most of one; None where that, or its time, is not known."""
    kind = step.get("type", "")
    match kind:
        case "Sequence":  # Without steps.
            return 1
        case "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            return max(1, -(-len(content) // len(pattern))) if pattern else None
        case "Prepend":
            return 1 if len(step["prepend"]) <= _MAX_AFFIX else None
        case "Split":
            pattern = step["pattern"]
            return 1 if pattern.get("String") or pattern.get("Regex") in KNOWN_PATTERNS else None
    return 1 if kind in _HARMLESS else _GROWTH.get(kind)


def _unbounded_model(model: Mapping[str, Any]) -> str | None:
    # Old files leave the type out.
    kind = model.get("type") or ("BPE" if "merges" in model else "model")
    if kind == "BPE":
        affixes = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
        return None if all(len(affix or "") <= _MAX_AFFIX for affix in affixes) else "BPE"
    if kind == "Unigram":
        longest = max((len(token) for token, _ in model["vocab"]), default=0)
        return None if longest <= _MAX_UNIGRAM_TOKEN else "Unigram"
    return str(kind)
