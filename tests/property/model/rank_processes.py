"""`python -m tests.property.model.rank_processes DIRECTORY SIZE...`: computes the results of `test_ranks` on ranks.

Each rank writes a file `SIZE-RANK.safetensors` to the directory. Ranks are forked from a process that has imported
torch but started none of its threads, because the import takes longer than everything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, multiprocessing

from kernels.choice import Backend, KernelOptions
from kernels.decoder import LayerListener
from kernels.ranks import TorchRanks
from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder
from tests.golden.paged import generate_greedily
from tests.property.model.plans import Placement, Plan, compute, random_text
from tests.property.model.tiny_models import Fields, make_rank_decoder
from tests.support import interpreted_language, interpreted_products
from tests.support.backends import REFERENCE

TRITON = KernelOptions(backend=Backend.TRITON)
FAMILIES: dict[str, Fields] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}
#: Prime, so that ranks have unequal shards of the vocabulary.
VOCAB_SIZE = 97
#: Texts and steps: a whole prompt, then a chunk with a single row, then two single rows, in blocks of four.
TEXTS = (tuple(random_text(1, 9, VOCAB_SIZE)), tuple(random_text(2, 6, VOCAB_SIZE)))
PLAN: Plan = [[(0, 7)], [(1, 5), (0, 1)], [(0, 1), (1, 1)]]
PLACEMENT = Placement(block_size=4)
TRITON_TEXTS, TRITON_PLAN = TEXTS[1:], [[(0, 4)], [(0, 1)], [(0, 1)]]
PROMPTS = (random_text(3, 11, VOCAB_SIZE), random_text(4, 3, VOCAB_SIZE))
#: Number of greedy tokens, and of ranks that compute them; each token takes six messages per rank.
GREEDY_TOKENS, GREEDY_SIZES = 32, (2,)
#: Shape of sums whose addends are far larger than the sum, so that another order of addition shows.
SUM_ROWS, SUM_WIDTH = 120, 33
#: Rows that are also summed one by one.
SINGLE_ROWS = slice(0, SUM_ROWS, 8)
_DEADLINE = timedelta(seconds=60)


def fields_of(family: str, size: int) -> Fields:
    """A model that `size` ranks can split, with two or four heads on each."""
    return {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 40,
        "intermediate_size": 33 * size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4 * size if family != "mistral" else 2 * size,
        "num_key_value_heads": 2 * size if family != "qwen2" else size,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | FAMILIES[family]


def addends(rank: int, dtype: torch.dtype) -> Tensor:
    """A rank's addend of the sum: [SUM_ROWS, SUM_WIDTH]."""
    generator = torch.Generator().manual_seed(rank)
    scale = torch.randint(-6, 7, (SUM_ROWS, SUM_WIDTH), generator=generator).exp2()
    return (torch.randn(SUM_ROWS, SUM_WIDTH, generator=generator) * scale).to(dtype)


class BroadcastingDecoder:
    """A rank's decoder that broadcasts rank 0's logits, because all ranks run the code that samples from them."""

    def __init__(self, decoder: Decoder, group: distributed.ProcessGroup) -> None:
        self._decoder = decoder
        self._group = group
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        logits = self._decoder.forward(batch, kv_cache)
        if self._group.rank() != 0:
            logits = torch.empty(len(batch.logits_rows), VOCAB_SIZE)
        if logits.numel():
            distributed.broadcast(logits, group=self._group, group_src=0)
        return logits


def runs_triton(size: int) -> bool:
    """Whether ranks of this size also run Triton kernels: one size only, because the interpreter is slow."""
    return size == 2 and importlib.util.find_spec("triton") is not None


def results_of(ranks: TorchRanks, group: distributed.ProcessGroup) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}

    def record(name: str, decoder: Decoder, texts: tuple[tuple[int, ...], ...], plan: Plan) -> None:
        broadcasting = BroadcastingDecoder(decoder, group)
        for index, computed in enumerate(compute(broadcasting, texts, plan, PLACEMENT)):  # type: ignore[arg-type]
            results[f"{name}/{index}/kv"] = computed.kv.contiguous()
            positions = sorted(computed.logits)
            results[f"{name}/{index}/positions"] = torch.tensor(positions)
            results[f"{name}/{index}/logits"] = torch.stack([computed.logits[position] for position in positions])

    for family in FAMILIES:
        fields = fields_of(family, ranks.size)
        for dtype in (torch.float32, torch.bfloat16):
            record(f"{family}/{dtype}", make_rank_decoder(fields, REFERENCE, dtype, ranks), TEXTS, PLAN)
        if ranks.size not in GREEDY_SIZES:
            continue
        decoder = BroadcastingDecoder(make_rank_decoder(fields, REFERENCE, torch.float32, ranks), group)
        tokens, _ = generate_greedily(decoder, PROMPTS, GREEDY_TOKENS, chunk=8)  # type: ignore[arg-type]
        results[f"{family}/tokens"] = torch.tensor(tokens)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = addends(ranks.rank, dtype)
        results[f"sum/{dtype}"] = ranks.all_reduce(own.clone())
        results[f"sums of rows/{dtype}"] = torch.cat([ranks.all_reduce(row[None].clone()) for row in own[SINGLE_ROWS]])
    assert ranks.all_reduce(torch.empty(0, 5)).shape == (0, 5)
    if runs_triton(ranks.size):
        triton_decoder = make_rank_decoder(fields_of("llama", 2), TRITON, torch.float32, ranks)
        record("triton", triton_decoder, TRITON_TEXTS, TRITON_PLAN)
    return results


def run(rank: int, size: int, rendezvous: str, directory: str) -> None:
    """The life of one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=_DEADLINE
    )
    group = distributed.group.WORLD
    assert group is not None
    save_file(results_of(TorchRanks(group), group), Path(directory) / f"{size}-{rank}.safetensors")
    distributed.destroy_process_group()


def main(directory: str, sizes: list[int]) -> None:
    """Returns when all ranks have ended. If one fails, ends the others and raises its error."""
    if any(map(runs_triton, sizes)):
        interpreted_products.install()
        interpreted_language.install()
        importlib.import_module("kernels.triton.decoder")
    for size in sizes:
        arguments = (size, f"{directory}/{size}-rendezvous", directory)
        multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            run, arguments, nprocs=size, start_method="fork"
        )


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]])
