"""The one decoder of the llama family; llama, mistral, qwen2 and qwen3 differ in config and weights only."""

from __future__ import annotations

from torch import Tensor

from kernels.choice import KernelOptions, open_decoder
from kernels.decoder import ALONE, DecoderShape, DecoderWeights, LayerListener, Ranks
from pdserve.model.batch import Batch
from pdserve.model.config import ModelConfig
from pdserve.model.rope import make_cos_sin


class Decoder:
    """Token ids in, logits out; K and V of the batch's rows are written to the cache on the way."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        max_model_len: int | None = None,
        kernels: KernelOptions | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """On several ranks, config and weights are this one's (`pdserve.model.sharding`).

        Raises `KernelsUnavailable`.
        """
        self.config = config
        #: Positions that can be served; the table of angles ends here.
        self.max_model_len = max_model_len or config.max_position_embeddings
        #: Of weights and activations.
        self.dtype = weights.norm.dtype
        #: Where the weights are; batches and the cache must be there too.
        self.device = weights.norm.device
        cos_sin = make_cos_sin(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=self.max_model_len,
        ).to(self.device)
        opened = open_decoder(kernels or KernelOptions(), decoder_shape(config), weights, cos_sin, ranks)
        self._kernel = opened.kernel
        #: The chosen backend and its settings.
        self.kernels = opened.choice
        #: None: the backend has no threads of its own.
        self.thread_counters = opened.thread_counters

    @property
    def weight_bytes(self) -> int:
        """Of the matrices, which a step reads at least once, as they lie in memory."""
        return self._kernel.weight_bytes

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        """Float32 logits [num_logits, vocab_size] of the batch's `logits_rows`, valid until the next call.

        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] contiguous, of the model's dtype, or
        float8_e4m3fn when the kernels' options have `kv_scales`.
        `on_layer` is told after each layer, or never (`kernels.decoder.DecoderKernel`).
        Of several ranks all compute the same batch, each in its own cache; the logits are rank 0's.
        """
        return self._kernel.forward(batch.token_ids, batch.kv_rows(), batch.logits_rows, kv_cache, on_layer)


def decoder_shape(config: ModelConfig) -> DecoderShape:
    """The same in the words of kernels."""
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        windows=tuple(config.layer_windows),
    )
