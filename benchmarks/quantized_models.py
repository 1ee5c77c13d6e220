"""The models that `benchmarks.quantization` compares, and the pairs of each comparison."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.choice import Backend, KernelOptions
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.model.batch import Batch
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.kv_scales import read_kv_scales
from pdserve.model.loader import load_decoder
from pdserve.worker.config import FP8_KV

#: Tokens of the longest sequence.
WINDOW = 1024
_BLOCK_SIZE = 16
#: Enough for one sequence of `WINDOW` tokens, or for 24 prompts with completions.
_NUM_BLOCKS = 384

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of models; `bfloat16` is the model served without the flag."""

    flag: str
    #: Aspect in which the models differ.
    subject: str
    models: tuple[str, ...]
    #: (compared model, baseline).
    pairs: tuple[Pair, ...]
    backend: Backend
    #: Name of the result files, without date.
    result_name: str


WEIGHTS = Comparison(
    flag="--quantization int8",
    subject="weights",
    models=("float32", "bfloat16", "int8"),
    pairs=(("int8", "bfloat16"), ("bfloat16", "float32"), ("int8", "float32")),
    backend=Backend.CPU,
    result_name="quantization",
)
KV_CACHE = Comparison(
    flag=f"--kv-cache-dtype {FP8_KV}",
    subject="KV cache",
    models=("bfloat16", FP8_KV),
    pairs=((FP8_KV, "bfloat16"),),
    backend=Backend.REFERENCE,
    result_name="quantization-kv",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder of the comparison, with memory for one long sequence or several short ones."""

    name: str
    decoder: Decoder
    kv_cache: KvCache

    @classmethod
    def load(cls, name: str, path: Path, backend: Backend, num_threads: int | None) -> Model:
        """Loads a model. `name`: bfloat16, float32, or for bfloat16 weights int8 or fp8_e4m3 (KV)."""
        dtype = "float32" if name == "float32" else "bfloat16"
        options = KernelOptions(
            backend=backend,
            quantization="int8" if name == "int8" else None,
            num_threads=num_threads,
            kv_scales=read_kv_scales(path, ModelConfig.from_dir(path)) if name == FP8_KV else None,
        )
        decoder = load_decoder(path, dtype=dtype, max_model_len=WINDOW, kernels=options)
        layout = KvLayout.uniform(
            model=name,
            dtype=FP8_KV if name == FP8_KV else dtype,
            block_size=_BLOCK_SIZE,
            num_layers=decoder.config.num_layers,
            num_kv_heads=decoder.config.num_kv_heads,
            head_dim=decoder.config.head_dim,
        )
        return cls(name=name, decoder=decoder, kv_cache=KvCache(layout, _NUM_BLOCKS, torch.device("cpu")))

    def forward(self, sequences: Sequence[list[int]], starts: Sequence[int], logits_rows: Sequence[int]) -> Tensor:
        """Computes tokens[start:] of each sequence; returns the logits of `logits_rows`, valid until the next call.

        Rows are counted over all sequences. The cache is divided evenly among the sequences, so their number must not
        change while its content is needed.
        """
        width = _NUM_BLOCKS // len(sequences)
        spans = [torch.arange(start, len(tokens)) for tokens, start in zip(sequences, starts, strict=True)]
        batch = Batch(
            token_ids=torch.tensor(
                [token for tokens, start in zip(sequences, starts, strict=True) for token in tokens[start:]]
            ),
            positions=torch.cat(spans),
            slot_mapping=torch.cat([span + index * width * _BLOCK_SIZE for index, span in enumerate(spans)]),
            query_starts=torch.tensor([0, *itertools.accumulate(map(len, spans))]),
            context_lens=torch.tensor([len(tokens) for tokens in sequences]),
            block_tables=torch.arange(len(sequences) * width).view(len(sequences), width),
            logits_rows=torch.tensor(logits_rows),
        )
        return self.decoder.forward(batch, self.kv_cache.tensor)

    def complete(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy completions of all prompts in one batch; the end-of-text token does not end them."""
        sequences = [list(prompt) for prompt in prompts]
        assert max(map(len, sequences)) + num_tokens <= _NUM_BLOCKS // len(prompts) * _BLOCK_SIZE
        starts = [0] * len(prompts)
        for _ in range(num_tokens):
            ends = itertools.accumulate(len(tokens) - start for tokens, start in zip(sequences, starts, strict=True))
            chosen = self.forward(sequences, starts, [end - 1 for end in ends]).argmax(-1).tolist()
            starts = [len(tokens) for tokens in sequences]
            for tokens, token in zip(sequences, chosen, strict=True):
                tokens.append(token)
        return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]
