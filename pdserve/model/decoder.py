"""The decoder of the llama family: llama, mistral, qwen2 and qwen3 differ only in config and weights."""

from __future__ import annotations

from torch import Tensor

from kernels.choice import KernelOptions, open_decoder
from kernels.decoder import ALONE, DecoderShape, DecoderWeights, LayerListener, Ranks
from pdserve.model.batch import Batch
from pdserve.model.config import ModelConfig
from pdserve.model.rope import make_cos_sin


class Decoder:
    """Computes logits from token ids, and writes K and V of the batch's rows to the cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        max_model_len: int | None = None,
        kernels: KernelOptions | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """With several ranks, config and weights are those of this rank (`pdserve.model.sharding`).

        Raises `KernelsUnavailable`.
        """
        self.config = config
        #: Maximum length of a sequence, and length of the table of angles.
        self.max_model_len = max_model_len or config.default_context
        #: Dtype of weights and activations.
        self.dtype = weights.norm.dtype
        #: Device of the weights, and of batches and the cache.
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
        #: Counters of the backend's own threads; None: it has none.
        self.thread_counters = opened.thread_counters
        #: Ends forward passes between two layers; None: the backend runs every pass to its end.
        self.interrupt = opened.kernel.interrupt
        #: Samples with the backend's own threads; None: it does not.
        self.row_sampler = opened.row_sampler

    @property
    def weight_bytes(self) -> int:
        """Size in memory of the matrices, which a step reads at least once."""
        return self._kernel.weight_bytes

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        """Float32 logits [num_logits, vocab_size] of the batch's `logits_rows`, valid until the next call.

        Of a batch that is `hidden_only`: hidden states after the final norm, float32 [num_logits, hidden_size].
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] contiguous, of the model's dtype, or
        float8_e4m3fn when the kernels' options have `kv_scales`.
        `on_layer` is called after each layer, or never (`kernels.decoder.DecoderKernel`).
        With several ranks, all compute the same batch, each in its own cache. Only rank 0 has the logits.
        Raises `PassInterrupted`.
        """
        rows, hidden_only = batch.kv_rows(), batch.hidden_only
        return self._kernel.forward(
            batch.token_ids, rows, batch.logits_rows, kv_cache, on_layer, hidden_only=hidden_only
        )


def decoder_shape(config: ModelConfig) -> DecoderShape:
    """The shape of a decoder for `kernels`, which do not know `ModelConfig`."""
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
