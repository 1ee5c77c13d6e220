"""Every architecture and rope type compared with transformers, on tiny checkpoints with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.model.loader import load_decoder
from tests.golden.compare import TOLERANCE, assert_same, reference_logits
from tests.golden.paged import generate_greedily
from tests.support.lazily import transformers
from tests.support.pooled import pooled_by_a_worker, vector
from tests.support.scoring import scored_by_a_worker

NEW_TOKENS = 64
PROMPT_LENGTHS = (57, 9)
_LONGROPE = {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.6 * i for i in range(8)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    #: Class of transformers.
    config: str
    changes: dict[str, object] = field(default_factory=dict)
    rope: dict[str, object] = field(default_factory=dict)
    #: Save the config with the fields of older checkpoints.
    old_form: bool = False
    #: Maximum length to serve and compare at; None: the model's own limit.
    max_model_len: int | None = None


CASES = [
    Case(
        name="llama with llama3 scaling",
        config="LlamaConfig",
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    Case(
        name="llama with biases and tied embeddings",
        config="LlamaConfig",
        changes={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case(name="llama without grouping", config="LlamaConfig", changes={"num_key_value_heads": 4}),
    Case(
        name="llama with linear scaling, old form",
        config="LlamaConfig",
        rope={"rope_type": "linear", "factor": 4.0},
        old_form=True,
    ),
    Case(
        name="llama with dynamic scaling within its limit",
        config="LlamaConfig",
        rope={"rope_type": "dynamic", "factor": 2.0},
    ),
    Case(
        name="llama with dynamic scaling beyond its limit",
        config="LlamaConfig",
        changes={"max_position_embeddings": 40},
        rope={"rope_type": "dynamic", "factor": 3.0},
        max_model_len=PROMPT_LENGTHS[0] + NEW_TOKENS,
    ),
    Case(name="mistral with a window shorter than the prompt", config="MistralConfig", changes={"sliding_window": 21}),
    Case(name="mistral without a window", config="MistralConfig", changes={"sliding_window": None}),
    Case(name="qwen2 with biases", config="Qwen2Config"),
    Case(
        name="qwen2 with a window in its upper layers",
        config="Qwen2Config",
        changes={"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    ),
    Case(name="qwen3 with qk-norm and its own head_dim", config="Qwen3Config", changes={"head_dim": 24}),
    Case(
        name="qwen3 with named layer types",
        config="Qwen3Config",
        changes={
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        name="qwen3 with yarn",
        config="Qwen3Config",
        changes={"head_dim": 16},
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    Case(
        name="llama with yarn, all its parameters and the old form",
        config="LlamaConfig",
        rope={
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 48,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        old_form=True,
    ),
    Case(
        name="llama with longrope, short",
        config="LlamaConfig",
        rope={"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128, **_LONGROPE},
        max_model_len=128,
    ),
    Case(
        name="llama with longrope, long",
        config="LlamaConfig",
        rope={"rope_type": "longrope", "original_max_position_embeddings": 64, **_LONGROPE},
    ),
]


def save_checkpoint(case: Case, directory: Path) -> None:
    """Saves a random model whose biases and norms are random too, so that all of them affect the result."""
    settings: dict[str, object] = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", **case.rope},
        **case.changes,
    }
    torch.manual_seed(20)
    config = getattr(transformers, case.config)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.normal_(centre, 0.15)
    model.save_pretrained(directory)
    if case.old_form:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        path.write_text(json.dumps(config))


def save_without_head(model: transformers.PreTrainedModel, directory: Path) -> None:
    """Saves the weights as those of embedding models are: with the names that they have in the model below the head."""
    config = (directory / "config.json").read_text()
    model.save_pretrained(directory)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert "embed_tokens.weight" in file.keys()  # noqa: SIM118 - it is no mapping
    (directory / "config.json").write_text(config)


@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[-6]], ids=lambda case: case.name)
def test_log_probabilities_of_prompts_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 211, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for prompt, ours in zip(prompts, scored_by_a_worker(load_decoder(tmp_path, dtype="float32"), prompts), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(ours) == len(prompt) - 1
        for position, (token, entry) in enumerate(zip(prompt[1:], ours, strict=True)):
            assert abs(entry.logprob - float(theirs[position, token])) < TOLERANCE
            best = theirs[position].topk(3)
            assert torch.allclose(best.values, torch.tensor(entry.top_logprobs), atol=TOLERANCE)


@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[-6]], ids=lambda case: case.name)
def test_embeddings_are_those_of_the_hidden_states_of_transformers(case: Case, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 211, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if case.changes.get("tie_word_embeddings"):
        save_without_head(model, tmp_path)
    decoder = load_decoder(tmp_path, dtype="float32")
    for kind in PoolingKind:
        for dimensions in (0, 16):
            embeddings = pooled_by_a_worker(decoder, prompts, Pooling(kind=kind, dimensions=dimensions))
            for prompt, ours in zip(prompts, embeddings, strict=True):
                with torch.inference_mode():
                    states = model(torch.tensor([prompt])).last_hidden_state[0]
                pooled = {PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0], PoolingKind.MEAN: states.mean(0)}
                theirs = torch.nn.functional.normalize(pooled[kind][: dimensions or None], dim=0)
                assert torch.allclose(theirs, torch.from_numpy(vector(ours).copy()), atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_and_logprobs_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    decoder = load_decoder(tmp_path, dtype="float32", max_model_len=case.max_model_len)
    generator = torch.Generator().manual_seed(7)
    # If frequencies depend on the length, those of transformers only equal ours at the maximum length.
    lengths = PROMPT_LENGTHS[:1] if case.rope.get("rope_type") in ("dynamic", "longrope") else PROMPT_LENGTHS
    prompts = [torch.randint(0, 211, (length,), generator=generator).tolist() for length in lengths]
    outputs, logits = generate_greedily(decoder, prompts, NEW_TOKENS, chunk=23, block_size=8)

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        assert_same(ours, output, reference_logits(model, prompt, output), case.name)
