"""Small tokenizers of both kinds, built without any file."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel


def byte_level() -> Tokenizer:
    """Every byte is a token, some pairs are merged, and there are added tokens, special and not."""
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
    """Bytes as <0x..>, a few pieces, and the decoder that Llama 2 has, or another."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "한"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
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
