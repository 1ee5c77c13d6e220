"""Small tokenizers of both kinds, built without files."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel


def byte_level() -> Tokenizer:
    """A tokenizer with a token for each byte, some merges, and added tokens, one of them special."""
    alphabet = sorted(ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("ì", "ķ"), ("ìķ", "Ī"), ("ð", "Ł")]
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("<tag>"), AddedToken("한국어")])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """A tokenizer with bytes as <0x..> and a few other tokens. `decoder` None: that of Llama 2."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    others = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "한"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *others]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer
