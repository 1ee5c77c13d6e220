"""The keys of a GGUF file: used, refused, or without effect here. No torch.

As `pdserve.model.known_fields` has the fields of a directory; docs/models.md has the same tables.
"""

from __future__ import annotations

import struct

from pdserve.base.logs import get_logger
from pdserve.model.fetch.gguf_file import GgufFile
from pdserve.model.fields import Fields
from pdserve.model.known_fields import KnownFields, names_of

log = get_logger(__name__)

_MAX_FLOAT32 = 3.4e38

#: Below the name of the architecture, such as `llama.`.
MODEL = KnownFields(
    used=names_of(
        "context_length embedding_length block_count feed_forward_length attention.head_count attention.head_count_kv "
        "attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.dimension_count "
        "rope.freq_base rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scale_linear "
        "expert_count"
    ),
    refused={
        "attention.scale": (),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.sliding_window": (0,),
        "attention.causal": (True,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "logit_scale": (1,),
        "residual_scale": (1,),
        "embedding_scale": (1,),
        "use_parallel_residual": (False,),
        "rope.scaling.attn_factor": (1,),
        "rope.scaling.yarn_ext_factor": (1,),
        "rope.scaling.yarn_attn_factor": (1,),
        "rope.scaling.yarn_beta_fast": (32,),
        "rope.scaling.yarn_beta_slow": (1,),
        "rope.scaling.yarn_log_multiplier": (0,),
    },
    ignored=names_of(
        "vocab_size attention.layer_norm_epsilon rope.scaling.finetuned tensor_data_layout pooling_type "
        "expert_used_count"
    ),
)

#: Below `tokenizer.`.
TOKENIZER = KnownFields(
    used=names_of(
        "ggml.model ggml.pre ggml.tokens ggml.scores ggml.token_type ggml.merges ggml.bos_token_id ggml.eos_token_id "
        "ggml.eot_token_id ggml.eom_token_id ggml.unknown_token_id ggml.padding_token_id ggml.add_bos_token "
        "ggml.add_eos_token ggml.add_space_prefix chat_template chat_template.tool_use"
    ),
    refused={
        "ggml.remove_extra_whitespaces": (False,),
        "ggml.precompiled_charsmap": ([],),
        "ggml.add_sep_token": (False,),
        "ggml.add_mask_token": (False,),
    },
    ignored=names_of(
        "ggml.seperator_token_id ggml.cls_token_id ggml.mask_token_id ggml.token_type_count ggml.prefix_token_id "
        "ggml.suffix_token_id ggml.middle_token_id ggml.fim_pre_token_id ggml.fim_suf_token_id ggml.fim_mid_token_id "
        "ggml.fim_pad_token_id ggml.fim_rep_token_id ggml.fim_sep_token_id ggml.added_tokens huggingface.json "
        "chat_templates"
    ),
)

#: Keys below `general.sampling.` that are used, with their names in the API.
SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
SAMPLING = KnownFields(
    used=frozenset(SAMPLING_NAMES),
    refused={"mirostat": (0,), "xtc_probability": (0,)},
    ignored=names_of("sequence penalty_last_n mirostat_tau mirostat_eta xtc_threshold"),
)


def below(metadata: Fields, prefix: str) -> Fields:
    """The keys that begin with a prefix, without it."""
    names = [name for name in metadata.names() if name.startswith(prefix)]
    return Fields({name.removeprefix(prefix): metadata.raw(name) for name in names}, metadata.where)


def check_keys(gguf: GgufFile, architecture: str) -> None:
    """Raises `SetupError` with the first key that asks for what is not supported. Logs those that nobody knows."""
    unknown = []
    for prefix, known in ((f"{architecture}.", MODEL), ("tokenizer.", TOKENIZER), ("general.sampling.", SAMPLING)):
        fields = below(gguf.metadata, prefix)
        known.check(fields)
        named = {f"chat_template.{name}" for name in fields.texts("chat_templates")}
        unknown += [f"{prefix}{name}" for name in known.unknown(fields) if name not in named]
    if unknown:
        log.info("gguf_keys_unknown", file=str(gguf.path), keys=unknown)


def sampling_defaults(metadata: Fields) -> dict[str, object]:
    """The sampling that the file recommends, as generation_config.json names it."""
    fields = below(metadata, "general.sampling.")
    found = {name: fields.raw(key) for key, name in SAMPLING_NAMES.items() if fields.has(key)}
    shown = {name: shortest(value) if isinstance(value, float) else value for name, value in found.items()}
    temperature = shown.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        shown["temperature"] = 0  # In llama.cpp, too, it is greedy.
    return shown


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    if abs(value) > _MAX_FLOAT32:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
