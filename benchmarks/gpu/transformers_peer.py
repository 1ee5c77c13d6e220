"""Answers the same requests with transformers' continuous batching, on the same weight tensors."""

from __future__ import annotations

import importlib.metadata
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.generation import Generation
from benchmarks.gpu.rows import Finding, Measured, NotMeasured
from benchmarks.gpu.setting import DTYPE, Setting
from kernels.bench.work import Work
from kernels.decoder import DecoderShape, DecoderWeights

#: Time for one run, beyond which it is given up.
_LIMIT_S = 60.0


class _TooSlow(Exception):
    """A run was given up; the text says how far it was."""


def throughput(setting: Setting) -> Finding:
    """Measures pdserve's kernels, then transformers; both warm, each run with its own prompts."""
    prompts = [_prompts(setting, run) for run in range(setting.sizes.long_repeats + 1)]
    ours_ms, work = _ours(setting, prompts)
    if setting.device.type != "cuda":
        return NotMeasured(why="transformers' continuous batching is measured only on a GPU")
    torch.cuda.empty_cache()
    model = build(setting.shape, setting.weights, setting.device)
    try:
        theirs_ms = _their_ms(setting, model, prompts)
    except _TooSlow as error:
        return NotMeasured(why=str(error))
    finally:
        model.destroy_cached_continuous_batching_manager()
    attention = model.config._attn_implementation
    version = importlib.metadata.version("transformers")
    how = f"a bare loop, against transformers {version} generate_batch with {attention}; medians of {len(theirs_ms)}"
    return Measured(samples_ms=ours_ms, against_ms=theirs_ms, work=work, how=how)


def _ours(setting: Setting, prompts: list[Tensor]) -> tuple[tuple[float, ...], Work]:
    """Times and work of the runs. The first is not counted. The memory is free again on return."""
    generation = Generation(setting, *setting.sizes.peer_load)
    samples_ms = [setting.clock.once_ms(partial(generation.run, ids)) for ids in prompts]
    return tuple(samples_ms[1:]), generation.work(setting)


def _prompts(setting: Setting, seed: int) -> Tensor:
    """Prompts of one run; no two runs share a prefix."""
    size = setting.sizes.peer_load[:2]
    ids = torch.randint(0, setting.shape.vocab_size, size, generator=torch.Generator().manual_seed(seed))
    return ids.to(setting.device)


def _their_ms(setting: Setting, model: Any, prompts: list[Tensor]) -> tuple[float, ...]:
    """Times of transformers. Its manager, cache and graphs are kept between runs; the first is not counted.

    Raises `_TooSlow`.
    """
    tokens = setting.sizes.peer_load[2]
    samples = []
    for ids in prompts:
        ms, results = setting.clock.timed(partial(_their_answers, model, ids, tokens))
        samples.append(ms)
        lengths = {len(result.generated_tokens) for result in results}
        if len(results) != len(ids) or lengths != {tokens}:
            raise RuntimeError(f"{len(results)} of {len(ids)} requests were answered, with {lengths} tokens")
    return tuple(samples[1:])


def _their_answers(model: Any, prompts: Tensor, tokens: int) -> list[Any]:
    """What `generate_batch` returns, which has no time limit. Raises `_TooSlow`."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers: list[Any] = []
    ends_at = time.monotonic() + _LIMIT_S
    with model.continuous_batching_context_manager(config, timeout=5, persistent_manager=True) as manager:
        manager.add_requests(inputs=prompts.tolist(), max_new_tokens=tokens)
        while len(answers) < len(prompts) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers.append(result)
            elif time.monotonic() > ends_at:
                raise _TooSlow(f"transformers answered {len(answers)} of {len(prompts)} in {_LIMIT_S:.0f} s")
    return answers


def build(shape: DecoderShape, weights: DecoderWeights, device: torch.device) -> Any:
    """transformers' model with our tensors, without copies. Positions as in `kernels.bench.inputs.rotations`."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        num_hidden_layers=len(shape.windows),
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=10_000.0,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype=DTYPE,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(DTYPE)
    model.load_state_dict(_state(weights), strict=True, assign=True)
    with device:
        # Not in the state: made from the config.
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def _state(weights: DecoderWeights) -> dict[str, Tensor]:
    """Our tensors by their names in transformers."""
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.lm_head,
    }
    for index, layer in enumerate(weights.layers):
        tensors = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": layer.q,
            "self_attn.k_proj": layer.k,
            "self_attn.v_proj": layer.v,
            "self_attn.o_proj": layer.output,
            "post_attention_layernorm": layer.post_attention_norm,
            "mlp.gate_proj": layer.gate,
            "mlp.up_proj": layer.up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in tensors.items()}
    return state
