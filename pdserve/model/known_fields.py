"""Every field of a model's directory that transformers reads: used, refused, or without effect here. No torch.

docs/models.md has the same tables, with what each field does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

#: Unknown fields of a file that are reported, and characters of each name.
_MAX_UNKNOWN, _MAX_NAME = 20, 64
#: Values besides null with which a field asks for nothing.
Neutral = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFields:
    """The fields of one file. One that is in no set is unknown: transformers' classes do not read it."""

    used: frozenset[str]
    #: They would change tokens, texts or limits. With the values at which they do not.
    refused: Mapping[str, Neutral]
    ignored: frozenset[str]

    def check(self, fields: Fields) -> None:
        """Raises `SetupError` with the first field that asks for what is not supported."""
        for name, neutral in self.refused.items():
            if fields.has(name) and not _is_neutral(fields.raw(name), neutral):
                allowed = f" (supported: {', '.join(map(repr, neutral))})" if neutral else ""
                raise SetupError(
                    f"{fields.where}: {name} is not supported{allowed}. Use a model without it, or remove the field "
                    "if its answers may differ."
                )

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.used | self.refused.keys() | self.ignored

    def unknown(self, fields: Fields) -> list[str]:
        """The names of the fields in no set, up to `_MAX_UNKNOWN`, without those that begin with an underscore."""
        found = (name for name in sorted(fields.names()) if name not in self.names and not name.startswith("_"))
        return [name[:_MAX_NAME] for name in islice(found, _MAX_UNKNOWN)]


def _is_neutral(value: object, neutral: Neutral) -> bool:
    # 1 is neither true nor 1.0's type, but equal to both: the number counts.
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def names_of(text: str) -> frozenset[str]:
    """The names in a text with spaces between them."""
    return frozenset(text.split())


CONFIG = KnownFields(
    used=names_of(
        "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps hidden_act "
        "attention_bias mlp_bias tie_word_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor "
        "layer_types sliding_window use_sliding_window max_window_layers dtype torch_dtype eos_token_id "
        "quantization_config is_encoder_decoder"
    ),
    refused={
        "compression_config": (),
        "auto_map": ({},),
        "num_local_experts": (0,),
        "num_experts": (0,),
        "n_routed_experts": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "attention_multiplier": (),
        "residual_multiplier": (1,),
        "embedding_multiplier": (1,),
        "logits_scaling": (1,),
        "logit_scale": (1,),
        "query_pre_attn_scalar": (),
        "clip_qkv": (),
        "no_rope_layers": ([],),
        "attention_chunk_size": (),
        "rope_interleaved": (False,),
        "use_mrope": (False,),
        "is_causal": (True,),
        "use_bidirectional_attention": (False,),
    },
    ignored=names_of(
        "transformers_version use_cache initializer_range attention_dropout bos_token_id pad_token_id pretraining_tp "
        "tokenizer_class is_llama_config output_attentions output_hidden_states return_dict id2label label2id "
        "problem_type task_specific_params torchscript pruned_heads tie_encoder_decoder add_cross_attention is_decoder "
        "chunk_size_feed_forward cross_attention_hidden_size finetuning_task prefix use_bfloat16 tf_legacy_loss "
        "decoder_start_token_id sep_token_id attn_implementation num_nextn_predict_layers"
    ),
)

#: Fields of generation_config.json, or of config.json where that file is missing.
GENERATION = KnownFields(
    used=names_of(
        "temperature top_p top_k min_p repetition_penalty max_new_tokens min_new_tokens stop_strings eos_token_id"
    ),
    refused={
        "suppress_tokens": ([],),
        "begin_suppress_tokens": ([],),
        "bad_words_ids": ([],),
        "sequence_bias": ({}, []),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
        "no_repeat_ngram_size": (0,),
        "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,),
        "min_length": (0,),
        "typical_p": (1,),
        "top_h": (),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "exponential_decay_length_penalty": (),
        "guidance_scale": (1,),
        "penalty_alpha": (0,),
        "watermarking_config": (),
        "num_beams": (1,),
        "num_beam_groups": (1,),
        "diversity_penalty": (0,),
        "constraints": (),
        "force_words_ids": (),
        "dola_layers": (),
        "token_healing": (False,),
        "max_time": (),
    },
    ignored=names_of(
        "do_sample max_length num_return_sequences bos_token_id pad_token_id decoder_start_token_id use_cache "
        "transformers_version cache_implementation cache_config early_stopping length_penalty "
        "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate low_memory "
        "remove_invalid_values renormalize_logits is_assistant num_assistant_tokens "
        "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind "
        "assistant_early_exit prompt_lookup_num_tokens max_matching_ngram_size trust_remote_code generation_kwargs "
        "disable_compile compile_config prefill_chunk_size max_cache_len assistant_ensemble_weight speculation_type "
        "continuous_batching_config use_mtp"
    ),
)

TOKENIZER = KnownFields(
    used=names_of(
        "bos_token eos_token unk_token pad_token sep_token cls_token mask_token added_tokens_decoder "
        "additional_special_tokens extra_special_tokens chat_template tokenizer_class response_template "
        "model_specific_special_tokens add_prefix_space"
    ),
    refused={"split_special_tokens": (False,), "fix_mistral_regex": (False,)},
    ignored=names_of(
        "clean_up_tokenization_spaces model_max_length padding_side truncation_side spaces_between_special_tokens "
        "auto_map add_bos_token add_eos_token legacy sp_model_kwargs use_default_system_prompt errors "
        "do_lower_case use_fast backend is_local local_files_only name_or_path tokenizer_file special_tokens_map_file "
        "processor_class model_input_names max_length stride truncation_strategy pad_to_multiple_of pad_token_type_id "
        "trim_offsets from_slow response_schema vocab_file merges_file"
    ),
)

#: The file of each set of fields.
FILES: Mapping[str, KnownFields] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER,
}


def check_directory(model_dir: Path) -> Mapping[str, list[str]]:
    """Refuses a directory that asks for what is not supported. Returns the unknown fields of its files.

    Raises `SetupError`.
    """
    unknown = {}
    for name, known in FILES.items():
        fields = Fields.read_optional(model_dir / name)
        known.check(fields)
        # Configs may have the fields of generation, too.
        names = [each for each in known.unknown(fields) if known is not CONFIG or each not in GENERATION.names]
        if names:
            unknown[name] = names
    # transformers and vLLM take them from there if they have no file of their own.
    GENERATION.check(generation_fields(model_dir))
    return unknown


def generation_fields(model_dir: Path) -> Fields:
    """The fields that decide how tokens are chosen: those of config.json where there is no file for them."""
    path = model_dir / "generation_config.json"
    return Fields.read_optional(path if path.exists() else model_dir / "config.json")
